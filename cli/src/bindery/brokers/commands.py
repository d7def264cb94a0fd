"""`bindery brokers`: drain brokers."""

from bindery.brokers import draining
from bindery.common.options import group

app = group("Drain brokers.")
draining.add_to(app)


@app.callback()
def brokers() -> None:
    """Drain brokers."""
