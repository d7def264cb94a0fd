"""Known damage and loss: the damage register and limbo."""
