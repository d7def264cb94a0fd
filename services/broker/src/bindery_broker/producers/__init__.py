"""Let a repeated request store nothing twice: sequence ids of producers, idempotency keys, access modes."""
