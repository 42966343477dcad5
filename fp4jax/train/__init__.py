"""Training: data, loss, step, checkpoint and the loop around them."""
