"""Reports say nothing of whose machine it is."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from paths import ROOT

from hpcgpu.deploy.bug_report import Scrubber
from hpcgpu.topology import hwloc_xml

WORDS = st.text("abhostuser01-", min_size=3, max_size=8).filter(
    lambda w: w not in ("user", "root", "host") and w.strip()
)


@given(st.dictionaries(st.sampled_from(["user", "host", "path"]), st.lists(WORDS, max_size=3)), st.data())
def test_nothing_of_the_words_remains(words: dict[str, list[str]], data: st.DataObject) -> None:
    secrets = [word for found in words.values() for word in found if word.lower() not in ("users",)]
    parts = st.lists(st.sampled_from([*secrets, "a", "host1", " ", "user", "x"]))
    text = "".join(data.draw(parts))
    scrubbed = Scrubber(words).scrub(text)
    assert not [word for word in secrets if word in scrubbed]


@pytest.mark.parametrize(
    ("text", "scrubbed"),
    [
        ("tls://10.3.4.5:8786 and 10.3.4.5", "tls://ip1:8786 and ip1"),
        ("10.0.0.1 10.0.0.2 10.0.0.1", "ip1 ip2 ip1"),
        ("127.0.0.1 0.0.0.0 hwloc 2.9.0", "127.0.0.1 0.0.0.0 hwloc 2.9.0"),
        ("[fe80::1:2]:80 at 10:20:30", "[ip1]:80 at 10:20:30"),
        ("3c:ec:ef:12:34:56", "mac1"),
        (
            "0000:41:00.0 GPU-3b2f9a10-1111-2222-3333-444455556666",
            "0000:41:00.0 GPU-uuid1",
        ),
        ("/u/ada/x of ada@site.edu on n12.site.edu", "path1/x of mail1 on host1"),
        ("job of ada on n12, ada's", "job of user1 on host2, user1's"),
        ("API_TOKEN=abc HF_TOKEN: 'x'", "API_TOKEN=(secret) HF_TOKEN: '(secret)'"),
        ('{"env": [["MY_SECRET", "s3"]]}', '{"env": [["MY_SECRET", "(secret)"]]}'),
        ("-----BEGIN PRIVATE KEY-----\nabc\n-----END PRIVATE KEY-----\n", "(a key or certificate was here)\n"),
    ],
)
def test_forms(text: str, scrubbed: str) -> None:
    words = {"user": ["ada"], "host": ["n12", "n12.site.edu"], "path": ["/u/ada"]}
    scrubber = Scrubber(words)
    if "host2" in scrubbed:
        scrubber.scrub("n12.site.edu")
    assert scrubber.scrub(text) == scrubbed


@pytest.mark.parametrize("name", ["turin-4gpu-nvml", "coral-lassen", "nvidiaDGX2"])
def test_a_scrubbed_topology_is_the_same_machine(name: str) -> None:
    text = (ROOT / "tests" / "data" / "topology" / f"{name}.xml").read_text()
    scrubbed = Scrubber({}).scrub(text)
    before, after = hwloc_xml.read_file(text), hwloc_xml.read_file(scrubbed)
    assert [(g.pci, g.numa_node, g.model) for g in before.gpus] == [(g.pci, g.numa_node, g.model) for g in after.gpus]
    assert (before.cores, before.nics, before.numa_nodes) == (after.cores, after.nics, after.numa_nodes)
    assert not [uuid for uuid in re.findall(r"GPU-[0-9a-f-]{36}", text) if uuid in scrubbed]
