"""Trains a drafter: `eagle3 train`, also under `accelerate launch` and `torchrun`. See docs/training.md."""

import sys

from eagle3.cli import main

if __name__ == "__main__":
    main(["train", *sys.argv[1:]])
