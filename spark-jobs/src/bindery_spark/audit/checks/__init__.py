"""The checks: pure functions of DataFrames, one for each kind of finding, that yield rows of FINDINGS."""
