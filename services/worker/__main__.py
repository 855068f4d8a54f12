"""`python -m services.worker`: one worker process."""

from common.errors import ConfigError
from common.lifecycle import end_on_config, start
from services.worker.process import serve

if __name__ == "__main__":
    try:
        serve(start("worker"))
    except ConfigError as error:
        end_on_config(error)
