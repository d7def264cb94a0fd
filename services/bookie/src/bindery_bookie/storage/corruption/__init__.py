"""What is known to be damaged or lost: the damage registry and limbo."""
