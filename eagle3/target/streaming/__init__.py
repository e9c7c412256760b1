"""One pass over a checkpoint's decoder layers: reading, unpacking and running them for a large chunk of tokens."""
