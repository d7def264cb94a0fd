"""Search by seed for disk failures that the real storage engine of a bookie does not survive.

- `crash`: power cuts before writes. During one run of a seeded workload, a snapshot is taken before operations of disk
  and index. It contains the state that a power cut would leave. The engine is started on each snapshot, and everything
  is read.
- `damage`: bits are flipped, files are truncated or removed, and blocks are zeroed or swapped, in every kind of file of
  a real directory, including LevelDB's. Entries that are then read must be correct or be reported as corrupt.

`history` records what the bookie acknowledged; `verdict` checks an engine against it. `mutants` injects one defect at a
time, and the searches must report each.
"""
