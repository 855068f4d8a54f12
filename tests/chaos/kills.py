"""`python -m tests.chaos.kills`: at least 60 kills under 32 streams. All of it is benchmarks/recovery.py."""

from benchmarks.recovery import main

if __name__ == "__main__":
    main()
