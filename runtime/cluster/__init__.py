"""Training beyond one machine: membership, averaging and healing between processes."""
