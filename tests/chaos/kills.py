"""`python -m tests.chaos.kills`: at least 60 kills under 32 streams; what it prints and draws is benchmarks/recovery.py's."""

from benchmarks.recovery import main

if __name__ == "__main__":
    main()
