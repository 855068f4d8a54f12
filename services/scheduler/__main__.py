"""`python -m services.scheduler`: the scheduler process."""

from common.lifecycle import main
from services.scheduler.process import serve

if __name__ == "__main__":
    main("scheduler", serve)
