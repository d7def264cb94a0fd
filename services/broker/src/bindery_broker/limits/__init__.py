"""Pure machines for the policies of topics: what is due, what is refused and for how long. `topics` executes them."""
