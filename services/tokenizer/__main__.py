"""`python -m services.tokenizer`: the tokenizer process."""

import sys

from common.lifecycle import main
from services.tokenizer.process import serve

if __name__ == "__main__":
    # Rendering a long chat is Python code in the pool; the loop shall not wait 5 ms for each of its turns meanwhile.
    sys.setswitchinterval(0.0005)
    main("tokenizer", serve)
