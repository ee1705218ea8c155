"""Where a client may connect, and that a token goes nowhere it can be read."""

from pathlib import Path

import pytest

from modelpress.connection import Endpoint
from modelpress.errors import InvalidRequest


@pytest.mark.parametrize(
    ("address", "target", "loopback", "tls"),
    [
        ("127.0.0.1:9000", "127.0.0.1:9000", True, False),
        ("localhost", "localhost:8471", True, False),
        ("[::1]:9000", "[::1]:9000", True, False),
        ("[::1]", "[::1]:8471", True, False),
        ("https://models.example:443/", "models.example:443", False, True),
        ("https://models.example", "models.example:8471", False, True),
        ("models.example:8471", "models.example:8471", False, False),
        ("127.0.0.1.example:1", "127.0.0.1.example:1", False, False),
    ],
)
def test_an_address_is_read_as_people_write_it(address, target, loopback, tls):
    endpoint = Endpoint(address)
    assert (endpoint.target, endpoint.loopback, endpoint.tls) == (target, loopback, tls)


@pytest.mark.parametrize("address", ["", ":8471", "https://"])
def test_an_address_without_a_host_is_refused(address):
    with pytest.raises(InvalidRequest, match="no host"):
        Endpoint(address)


def test_a_token_never_travels_in_the_clear_to_another_machine():
    with pytest.raises(InvalidRequest, match="unencrypted") as caught:
        Endpoint("models.example:8471", token="s3cret")
    assert "s3cret" not in str(caught.value)
    Endpoint("127.0.0.1:8471", token="s3cret")
    Endpoint("https://models.example:8471", token="s3cret")
    Endpoint("models.example:8471", token="s3cret", tls_ca=Path("ca.pem"))


@pytest.mark.parametrize("token", ["", "two\nlines", "t\u00f6ken", "nul\0"])
def test_a_token_that_no_header_can_carry_is_refused_without_showing_it(token):
    with pytest.raises(InvalidRequest) as caught:
        Endpoint(token=token)
    assert not token or token not in str(caught.value)


def test_a_token_is_in_no_representation():
    assert "s3cret" not in repr(Endpoint(token="s3cret"))
