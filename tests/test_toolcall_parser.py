"The recovery parser on inputs nobody thought of: it never fails, never reads a text twice, and gives back what was written."
import json
import subprocess
import sys

from hypothesis import given, settings, strategies as st

from granite.toolcall import parser
from granite.toolcall.parser import VERDICTS, Call, object_spans, recover_calls

values = st.recursive(st.none() | st.booleans() | st.integers(-10**18, 10**18) | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
                      lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4), max_leaves=12)
calls = st.builds(Call, st.text(min_size=1).map(str.strip).filter(bool), st.dictionaries(st.text(), values, max_size=5))
pieces = st.sampled_from(['{', '}', '[', ']', '"', '\\', ':', ',', '{"', '":', '"}', '{"name":', '"f"', '"arguments":', '{}', '1', 'true', '```json\n', '<think>', '</think>',
                          '<tool_call>', '\n', ' ', '{"name": "f", "arguments": {"a": "}"}}', 'é', '\u0663'])
junk = st.text() | st.lists(pieces, max_size=60).map("".join)
no_braces = st.text(st.characters(exclude_characters="{"), max_size=30).filter(lambda t: not t.lstrip().startswith("<think>"))


@settings(max_examples=600, deadline=None)
@given(junk)
def test_every_reply_has_one_verdict(text):
    reading = recover_calls(text)
    assert reading.verdict in VERDICTS
    assert (reading.call is not None) == (reading.verdict in ("strict", "recovered"))
    ends = [(c.start, c.end) for c in reading.candidates]
    assert all(a < b for a, b in ends) and all(e <= s for (_, e), (s, _) in zip(ends, ends[1:]))
    for start, end in ends: assert isinstance(json.loads(text[start:end]), dict)


@settings(max_examples=300, deadline=None)
@given(junk)
def test_what_is_accepted_reads_back_as_the_same_call(text):
    for call in recover_calls(text).calls: assert recover_calls(call.as_json()).call == Call(call.name, call.arguments)


@settings(max_examples=300, deadline=None)
@given(calls, no_braces, no_braces, st.sampled_from([None, 1, 4]), st.booleans())
def test_a_written_call_is_found_in_any_text_without_braces(call, before, after, indent, ascii_only):
    written = json.dumps({"name": call.name, "arguments": call.arguments}, indent=indent, ensure_ascii=ascii_only)
    reading = recover_calls(before + written + after)
    assert reading.call == call
    assert reading.whole == (not (before + after).strip(" \t\r\n"))


@settings(max_examples=200, deadline=None)
@given(calls, calls, no_braces)
def test_two_calls_are_never_merged(first, second, between):
    reading = recover_calls(first.as_json() + between + second.as_json())
    assert reading.verdict == "ambiguous" and reading.call is None and reading.calls == [first, second]


@settings(max_examples=200, deadline=None)
@given(st.text(), st.dictionaries(st.text(), st.text() | st.integers(), max_size=5))
def test_no_part_of_a_call_passes_for_one(name, arguments):
    written = Call(name, arguments).as_json()
    for end in range(0, len(written), max(1, len(written) // 40)): assert recover_calls(written[:end]).verdict == "no_json"


@settings(max_examples=200, deadline=None)
@given(st.lists(pieces, max_size=200).map("".join))
def test_work_grows_with_the_text(text):
    "Tokens read are counted rather than timed: each character starts at most two of them."
    count, real = 0, parser._next_token
    def counted(*a):
        nonlocal count; count += 1
        return real(*a)
    parser._next_token = counted
    try: object_spans(text)
    finally: parser._next_token = real
    assert count <= 2 * len(text) + 2


def test_import_is_light():
    code = "import sys, granite.toolcall.parser; print([m for m in ('pandas', 'numpy', 'torch', 'litellm', 'jsonschema') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60).stdout.strip() == "[]"
