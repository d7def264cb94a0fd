"""Simulated clusters with auditors: the kinds of such clusters, their faults, invariants and mutants.

| module    | holds                                                                          |
|-----------|--------------------------------------------------------------------------------|
| `plan`    | which kind of cluster a seed gives, and the machine that an auditor runs on    |
| `faults`  | faults of auditors, and the schedule of faults in a cluster that heals         |
| `verdict` | the invariants of healing, judged from outside                                 |
| `mutants` | deliberate defects of recovery that the verdict must report                    |
"""
