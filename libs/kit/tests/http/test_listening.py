"""Binding: which addresses are refused, and errors with their fix."""

import socket

import pytest
from bindery_kit.http import listening
from bindery_kit.http.listening import BindRefused, bind_tcp, check_bind


@pytest.mark.parametrize(
    "host",
    ["0.0.0.0", "::", "", "192.0.2.1", "example.org", "Localhost", "localhost.", "127.1", "0", "2130706433", "0x7f1",
     "127.0.0.1.example.org", "::ffff:192.0.2.1", " 127.0.0.1", "127.0.0.1 "],
)  # fmt: skip
def test_only_loopback_is_bound_without_insecure(host: str) -> None:
    with pytest.raises(BindRefused, match="--insecure"):
        bind_tcp(host, 0)


def test_the_refusal_tells_how_to_authenticate_clients_where_that_is_possible() -> None:
    with pytest.raises(BindRefused, match=r"use 127.0.0.1, set --tokens, or pass --insecure"):
        bind_tcp("0.0.0.0", 0, remedy="set --tokens")
    with pytest.raises(BindRefused, match=r"use 127.0.0.1, or pass --insecure"):
        check_bind("0.0.0.0", insecure=False)


@pytest.mark.parametrize("insecure", [False, True])
def test_a_localhost_that_is_another_address_is_refused(monkeypatch: pytest.MonkeyPatch, insecure: bool) -> None:
    """Other code takes `localhost` for loopback, and requires no tokens there."""
    monkeypatch.setattr(listening.socket, "socket", SocketOfAnotherAddress)
    with pytest.raises(BindRefused, match=r"localhost, which resolves to 192.0.2.1, where other machines can connect"):
        bind_tcp("localhost", 0, insecure=insecure)
    assert SocketOfAnotherAddress.is_closed


class SocketOfAnotherAddress(socket.socket):
    """As if /etc/hosts had `192.0.2.1 localhost`."""

    is_closed = False

    def getsockname(self) -> tuple[str, int]:
        return ("192.0.2.1", 8000)

    def close(self) -> None:
        type(self).is_closed = True
        super().close()


def test_loopback_is_bound_and_other_addresses_only_with_insecure() -> None:
    bind_tcp("127.0.0.1", 0).close()
    bind_tcp("0.0.0.0", 0, insecure=True).close()


def test_the_error_of_a_port_in_use_names_it_and_the_fix() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(BindRefused, match=f"cannot listen on 127.0.0.1:{port}: Address already in use; another"):
            bind_tcp("127.0.0.1", port)
