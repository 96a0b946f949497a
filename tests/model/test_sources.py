"""Names of models, and what a hub answers: a real server on this machine stands in for the hub."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from huggingface_hub import constants

from rayspec.model.sources import check_name, check_source
from rayspec.types import CheckpointError, ConfigError


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("demoo", "option 'model' is 'demoo', and there is no such folder; did you mean 'demo'?"),
        ("SmolLM", "there is no such folder; did you mean 'smollm2'?"),
        ("/no/where", "option 'model' is '/no/where', and there is no such folder: name a folder that exists"),
        ("a/b/c", "no such folder"),
        ("", "option 'model' is '', which is neither a folder nor a hub id"),
        ("two words", "neither a folder nor a hub id"),
    ],
)
def test_a_name_that_cannot_be_a_model_is_refused(name: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_name(name)
    assert message in str(caught.value)


def test_files_and_folders_that_are_no_checkpoints_are_refused(tmp_path: Path) -> None:
    check_name("/no/where", is_elsewhere=True)
    check_name("owner/repository:model.gguf")
    with pytest.raises(ConfigError, match="neither a folder nor a hub id"):
        check_name("owner name/repository:model.gguf")
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        check_source(str(tmp_path))
    check_source(str(tmp_path), option="tokenizer")
    for name in ("model.safetensors", "model.gguf"):
        (tmp_path / name).touch()
    with pytest.raises(ConfigError, match="which is a file"):
        check_name(str(tmp_path / "model.safetensors"))
    check_source(str(tmp_path / "model.gguf"))
    check_source(str(tmp_path))


class Hub(BaseHTTPRequestHandler):
    """Answers by the name of the repository."""

    num_requests = 0

    def do_HEAD(self) -> None:
        type(self).num_requests += 1
        code = {"none": "RepoNotFound", "gated": "GatedRepo", "old": "RevisionNotFound", "bare": "EntryNotFound"}
        name = self.path.split("/")[2]
        status = {"whole": 200, "gated": 403, "busy": 503}.get(name, 404)
        self.send_response(status)
        if name in code:
            self.send_header("X-Error-Code", code[name])
        for header in ("ETag", "X-Repo-Commit"):
            self.send_header(header, "0" * 40)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[HTTPServer]:
    server = HTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setattr(
        constants, "HUGGINGFACE_CO_URL_TEMPLATE", constants.ENDPOINT + "/{repo_id}/resolve/{revision}/{filename}"
    )
    monkeypatch.setattr(Hub, "num_requests", 0)
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("org/none", "'org/none' is not a local folder, and the hub has none of that name"),
        ("org/gated", "accept its terms on the hub"),
        ("org/old", "the hub has no revision 'main' of it"),
    ],
)
def test_what_the_hub_does_not_give_is_one_request_and_one_line(name: str, message: str, hub: HTTPServer) -> None:
    with pytest.raises(CheckpointError) as caught:
        check_source(name, revision="main")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert Hub.num_requests == 1


def test_what_the_hub_may_give_is_left_to_the_loader(hub: HTTPServer) -> None:
    for name in ("org/whole", "org/bare", "org/busy"):
        check_source(name)
    assert Hub.num_requests == 3


def test_a_hub_that_is_not_there_is_not_waited_for(hub: HTTPServer, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.shutdown()
    hub.server_close()
    with pytest.raises(CheckpointError, match=r"hub cannot be reached .*hf download org/name"):
        check_source("org/name")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(CheckpointError, match="HF_HUB_OFFLINE forbids"):
        check_source("org/name")


def test_cached_files_are_not_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hub: HTTPServer) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    repository = tmp_path / "models--org--name"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("c0ffee")
    (repository / "snapshots" / "c0ffee").mkdir(parents=True)
    (repository / "snapshots" / "c0ffee" / "config.json").write_text("{}")
    check_source("org/name")
    assert Hub.num_requests == 0
