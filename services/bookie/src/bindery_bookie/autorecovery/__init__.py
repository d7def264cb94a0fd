"""Recovery of the whole cluster, run inside this bookie."""
