"""Scripts of known defects of BookKeeper give the traces in the golden files.

`REWRITE_TRANSCRIPTS=1` writes the golden files; the comparison then always succeeds.
"""

import os
from pathlib import Path

import pytest
from bindery_simulation.protocol.scenarios import SCENARIOS, Scenario

GOLDEN = Path(__file__).parent.parent / "golden" / "protocol"


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
@pytest.mark.parametrize("with_defect", [False, True], ids=["as_it_is", "with_the_defect"])
def test_a_scenario_gives_the_trace_in_its_golden_file(scenario: Scenario, with_defect: bool) -> None:
    """Without the defect every invariant holds; with it the named invariant is violated."""
    chart, violation = scenario.play(with_defect=with_defect)
    assert (violation and violation.invariant) == (scenario.violates if with_defect else None), str(violation)
    path = GOLDEN / f"{scenario.name}{'_with_the_defect' if with_defect else ''}.txt"
    text = "\n".join(chart.lines) + "\n"
    if os.environ.get("REWRITE_TRANSCRIPTS"):
        path.write_text(text)
    assert text == path.read_text()
