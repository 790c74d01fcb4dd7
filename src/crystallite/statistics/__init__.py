"""What layers read and write on data: sums for least squares, observers, checkpoints."""
