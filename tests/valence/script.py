"""Runs its first argument as Python: a program for the supervisor's tests."""

import sys

if __name__ == "__main__":
    exec(sys.argv[1])
