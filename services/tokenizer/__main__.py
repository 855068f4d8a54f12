"""`python -m services.tokenizer`: the tokenizer process."""

from common.lifecycle import main
from services.tokenizer.process import serve

if __name__ == "__main__":
    main("tokenizer", serve)
