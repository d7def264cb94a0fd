"""Searches that make the bookie's storage trustworthy: the real engine, by seed, against what its disks can do to it.

- `crash`: the power goes before every single write. One run of a seeded workload is photographed before each operation
  of disk and index; every photograph is what some power cut would leave, and is opened and questioned.
- `damage`: bits flip, files shrink, blocks become zeros, change places or vanish, in every kind of real file of a real
  directory, LevelDB's too. What is then read must be right, or be said to be damaged.

Who knows what was promised is the `History` of the workload; `verdict` asks the engine for it. `mutants` break the
product's promises one by one, to show that the verdict can say no.
"""
