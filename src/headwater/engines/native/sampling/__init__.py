"""From logits to tokens: penalties, masks, cuts, draws and log-probabilities, one row at a time."""
