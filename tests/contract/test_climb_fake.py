"""A climb against the fake backend at the costs of a 27B model on HRX, by the fake's own record."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from random import Random

import pytest
from llama_process import Llama

from onebit_serve.core.climb import begin
from onebit_serve.core.shapes import ShapeModel, Splitting, classes_for

UBATCH_TOKENS = 64  # as many classes as a test has time for
SLOTS = 4
SCALE = 0.002


@pytest.fixture
def hrx(fake_llama, tmp_path):
    model = tmp_path / "fake.gguf"
    model.write_bytes(b"GGUF")
    llama = Llama(
        fake_llama,
        tmp_path,
        *("-m", str(model), "-np", str(SLOTS), "-ub", str(UBATCH_TOKENS), "-c", "40000"),
        knobs=f"model=hrx scale={SCALE}",
    )
    yield llama.ready()
    llama.stop()


def send(llama, prompt_tokens, decode_tokens, slots):
    """Send one synthetic request, or several at once, and return the wall time they took."""

    def post(decode, slot):
        body = {
            "prompt": [20 + i % 50 for i in range(prompt_tokens)],
            "n_predict": decode,
            "temperature": 0,
            "cache_prompt": False,
            "id_slot": slot,
        }
        answer = llama.client.post("/completion", json=body)
        assert answer.status_code == 200, answer.text

    started_s = time.perf_counter()
    with ThreadPoolExecutor(len(decode_tokens)) as pool:
        list(pool.map(post, decode_tokens, slots))
    return time.perf_counter() - started_s


def built(llama):
    return set(llama.client.get("/fake/shapes").json()["built"])


def test_no_request_meets_a_shape_that_is_not_built(hrx):
    model = ShapeModel(
        Splitting(ubatch_tokens=UBATCH_TOKENS), classes_for("hrx", UBATCH_TOKENS), SLOTS
    )
    send(hrx, 465, (8,), (0,))
    climb = begin(
        model, "hrx", first_prompt_tokens=465, first_decode_tokens=8, first_step_s=0.08 * SCALE
    )
    left_s = 0.05
    while True:
        climb, request = climb.before(left_s)
        if request is None:
            break
        slots = range(request.sequences)
        first_s = send(hrx, request.prompt_tokens, request.decode_tokens, slots)
        left_s -= first_s
        climb = climb.completed(request, first_s)
    while True:
        slots = hrx.client.get("/slots").json()
        climb, request, free = climb.idle(slots, host_cache=True)
        if request is None:
            break
        first_s = send(hrx, request.prompt_tokens, request.decode_tokens, free)
        climb = climb.completed(request, first_s)
    warm = built(hrx)
    random = Random(2)
    for _ in range(20):
        send(hrx, random.randint(1, 8192), (2,), (-1,))
    send(hrx, 5, (30, 30, 30, 30), (0, 1, 2, 3))
    assert built(hrx) == warm
    assert climb.view().warmed == climb.view().planned
