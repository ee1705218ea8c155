"""Flag, then environment, then file; and no token is ever shown."""

import platformdirs
import pytest

from modelpress.connection import DEFAULT_ADDRESS
from modelpress.errors import InvalidRequest
from modelpress.settings import Settings, find_endpoint


@pytest.fixture
def config(tmp_path):
    """config(text) -> an environment whose settings file holds `text`."""

    def write(text):
        (tmp_path / "config.toml").write_text(text)
        return {"MODELPRESS_CONFIG": str(tmp_path / "config.toml")}

    return write


def test_nothing_set_means_the_local_server(monkeypatch, tmp_path):
    monkeypatch.setattr(platformdirs, "user_config_path", lambda name: tmp_path / name)
    endpoint = find_endpoint(Settings(), {})
    assert (endpoint.address, endpoint.token, endpoint.tls_ca) == (DEFAULT_ADDRESS, None, None)


def test_the_default_file_is_read(monkeypatch, tmp_path):
    monkeypatch.setattr(platformdirs, "user_config_path", lambda name: tmp_path / name)
    (tmp_path / "modelpress").mkdir()
    (tmp_path / "modelpress/config.toml").write_text('address = "localhost:1"')
    assert find_endpoint(Settings(), {}).address == "localhost:1"


def test_flag_beats_environment_beats_file(config):
    environment = config('address = "localhost:1"\ntoken = "from-file"')
    assert find_endpoint(Settings(), environment).address == "localhost:1"
    environment |= {"MODELPRESS_ADDRESS": "localhost:2"}
    assert find_endpoint(Settings(), environment).address == "localhost:2"
    assert find_endpoint(Settings(address="localhost:3"), environment).address == "localhost:3"
    assert find_endpoint(Settings(address="localhost:3"), environment).token == "from-file"


def test_a_token_comes_from_the_highest_layer_that_has_one(config, tmp_path):
    (tmp_path / "token").write_text("from-flag-file\n")
    environment = config('token = "from-file"')
    assert find_endpoint(Settings(), environment).token == "from-file"
    environment |= {"MODELPRESS_TOKEN": "from-environment"}
    assert find_endpoint(Settings(), environment).token == "from-environment"
    assert find_endpoint(Settings(token_file=tmp_path / "token"), environment).token == "from-flag-file"


def test_an_empty_variable_is_not_set(config):
    environment = config('address = "localhost:1"') | {"MODELPRESS_ADDRESS": "", "MODELPRESS_TOKEN": ""}
    endpoint = find_endpoint(Settings(), environment)
    assert (endpoint.address, endpoint.token) == ("localhost:1", None)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("adress = 'x'", "did you mean 'address'"),
        ("address = 3", "address"),
        ("token = 12345678", "token: must be text"),
        ("token = 's3cret", "is not TOML"),
        ("token = 's3cret'\ntoken_file = 'x'", "both token and token_file"),
        ("token_file = '/nowhere/token'", "cannot read the token file"),
    ],
)
def test_a_fault_in_the_file_is_one_sentence_without_the_token(config, text, sentence):
    with pytest.raises(InvalidRequest) as caught:
        find_endpoint(Settings(), config(text))
    assert sentence in str(caught.value)
    assert "s3cret" not in str(caught.value)
    assert "12345678" not in str(caught.value)


def test_a_named_file_must_be_there(tmp_path):
    with pytest.raises(InvalidRequest, match="not there"):
        find_endpoint(Settings(), {"MODELPRESS_CONFIG": str(tmp_path / "none.toml")})


def test_a_token_is_in_no_representation():
    assert "s3cret" not in repr(Settings(token="s3cret"))
