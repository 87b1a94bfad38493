from __future__ import annotations

from collections.abc import Iterator

import pytest

from kv_index import watched_streams


@pytest.fixture(scope="session", autouse=True)
def every_stream_of_kv_events_can_be_indexed() -> Iterator[None]:
    with watched_streams():
        yield
