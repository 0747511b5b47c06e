"""Training on several machines: membership, averaging and healing between processes."""
