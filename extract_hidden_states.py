"""Stores a target's hidden states for conversations: `eagle3 extract`. See docs/extraction.md."""

import sys

from eagle3.cli import main

if __name__ == "__main__":
    main(["extract", *sys.argv[1:]])
