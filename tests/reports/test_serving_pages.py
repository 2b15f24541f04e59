"""The page as it is served: for this machine alone, and anew when runs have written something."""

import http.client
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from toys_runs import log, place, write_population, write_run

from jaxrl.errors import SettingsError
from jaxrl.reports.groups import group_runs
from jaxrl.reports.page import page
from jaxrl.reports.read import read_runs
from jaxrl.reports.serve import Pages, server


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path / "a", scores=[1.0])


@pytest.fixture
def port(run: Path) -> Iterator[int]:
    """The port at which the page of `run` is served."""
    httpd = server(0, Pages([str(run)], lambda stamp: page(group_runs(read_runs([str(run)])), [], "0;", stamp)))
    thread = threading.Thread(target=httpd.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield httpd.server_port
    httpd.shutdown()
    thread.join()
    httpd.server_close()


def get(port: int, path: str, host: str = "localhost") -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request("GET", path, headers={"Host": f"{host}:{port}"})
    answer = connection.getresponse()
    said = answer.read().decode()
    connection.close()
    return answer.status, said


def test_the_page_is_made_anew_when_rows_come(run: Path, port: int) -> None:
    _, stamp = get(port, "/stamp")
    status, before = get(port, "/")
    assert status == 200
    assert f'"stamp":"{stamp}"' in before
    assert get(port, "/") == (200, before)
    log(run, [{"kind": "eval", **place(2), "score": 12345.0}])
    assert get(port, "/stamp")[1] != stamp
    assert "12345" not in before
    assert "12345" in get(port, "/")[1]


def test_the_page_of_a_member_is_made_anew_when_its_population_writes(tmp_path: Path) -> None:
    population = write_population(tmp_path / "pop", {0.1: [1.0]})
    pages = Pages([str(population / "members/00000")], lambda stamp: stamp)
    before = pages.page()
    log(population, [{"kind": "eval", "member": 0, **place(2), "score": 2.0}])
    assert pages.page() != before


def test_a_run_that_is_gone_leaves_the_last_page(run: Path, port: int) -> None:
    _, before = get(port, "/")
    _, stamp = get(port, "/stamp")
    (run / "config.yaml").rename(run.parent / "elsewhere")
    assert get(port, "/") == (200, before)
    assert get(port, "/stamp") == (200, stamp)  # or an open page would be loaded again and again


def test_other_names_and_other_pages_get_nothing(port: int) -> None:
    assert get(port, "/", host="elsewhere.example")[0] == 403
    assert get(port, "/../config.yaml")[0] == 404


@pytest.mark.parametrize(
    "host", ["127.0.0.1:80@evil.example", "localhost:80:80", "localhost.evil.example", "localhost:"]
)
def test_a_host_that_only_begins_like_this_machine_is_refused(port: int, host: str) -> None:
    with socket.create_connection(("127.0.0.1", port), 10) as connection:
        connection.sendall(f"GET / HTTP/1.0\r\nHost: {host}\r\n\r\n".encode())
        assert b" 403 " in connection.makefile("rb").readline()


def test_a_port_in_use_is_refused(port: int, run: Path) -> None:
    with pytest.raises(SettingsError, match=f"port {port}: .*choose another"):
        server(port, Pages([str(run)], lambda stamp: ""))
    with pytest.raises(SettingsError, match="port 99999"):
        server(99_999, Pages([str(run)], lambda stamp: ""))
