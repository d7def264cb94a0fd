"""Exit codes are an interface: scripts rely on the numbers."""

from bindery.common import exit_codes


def test_the_numbers_never_change() -> None:
    codes = {name: code for name, code in vars(exit_codes).items() if name.isupper()}
    assert codes == {"OK": 0, "FAILURE": 1, "USAGE": 2, "DAMAGE": 3, "INTERRUPTED": 130}
