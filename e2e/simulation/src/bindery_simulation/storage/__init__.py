"""Search for failures of disks that the real storage engine of a bookie does not survive, by seed.

- `crash`: power cuts before every single write. During one run of a seeded workload a snapshot is taken before each
  operation of disk and index: the state that a power cut would leave. The engine is started on every snapshot, and
  everything is read.
- `damage`: bits are flipped, files truncated, blocks zeroed, swapped or removed, in every kind of file of a real
  directory, including LevelDB's. Entries that are then read must be right, or reported as corrupt.

`history` records what the workload was promised; `verdict` checks an engine against it. `mutants` breaks the promises
of the product one by one, and the searches must report each.
"""
