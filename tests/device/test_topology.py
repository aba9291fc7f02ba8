"""Which cards are nearest, on trees like those of the instances."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from neuron_pushkv.device.topology import (
    TABLES,
    cuda_nics,
    efa_nics,
    instance_family,
    neuron_device_of,
    neuron_nics,
)

EFA = ("0x1d0f", "0xefa3", "0x020000")
ENA = ("0x1d0f", "0xec20", "0x020000")
GPU = ("0x10de", "0x2335", "0x030200")
SWITCH_OF_NVIDIA = ("0x10de", "0x22a3", "0x068000")
TRAINIUM = ("0x1d0f", "0x7364", "0x120000")


@dataclass
class Tree:
    """A sysfs that is made as the kernel makes it: devices in the tree of bridges, and links to them by address."""

    sys: Path

    def add(self, bdf: str, kind: tuple[str, str, str], *bridges: str, node: int = 0, name: str = "") -> None:
        bdf = f"0000:{bdf}"
        place = self.sys / "devices" / "/".join(bridges or (f"pci0000:{bdf[5:7]}",)) / bdf
        place.mkdir(parents=True)
        for file, text in zip(("vendor", "device", "class"), kind, strict=True):
            (place / file).write_text(text + "\n")
        (place / "numa_node").write_text(f"{node}\n")
        if name:
            (place / "infiniband" / name).mkdir(parents=True)
        links = self.sys / "bus/pci/devices"
        links.mkdir(parents=True, exist_ok=True)
        (links / bdf).symlink_to(Path("../../..") / place.relative_to(self.sys))

    def nic(self, bdf: str, *bridges: str, node: int = 0) -> str:
        bus, rest = bdf.split(":")
        name = f"rdmap{int(bus, 16)}s{int(rest.split('.')[0], 16)}"
        self.add(bdf, EFA, *bridges, node=node, name=name)
        return name

    def is_a(self, product: str) -> None:
        place = self.sys / "devices/virtual/dmi/id"
        place.mkdir(parents=True)
        (place / "product_name").write_text(product + "\n")


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path / "sys")


def gpus_below_switches(tree: Tree, gpus: int, cards: int) -> tuple[list[str], list[list[str]]]:
    """Four switches, two to a node of memory, each with ``gpus`` GPUs and ``cards`` cards; their addresses, names."""
    addresses, names = [], []
    for switch in range(4):
        bridges = (f"pci0000:{0x40 + switch:02x}", f"0000:{0x40 + switch:02x}:01.0")
        bus = 0x50 + 0x20 * switch
        tree.add(f"{bus:02x}:00.0", ENA, *bridges, node=switch // 2)
        names.append([tree.nic(f"{bus + 1 + card:02x}:00.0", *bridges, node=switch // 2) for card in range(cards)])
        for gpu in range(gpus):
            addresses.append(f"{bus + 0x18 + gpu:02x}:00.0")
            tree.add(addresses[-1], GPU, *bridges, node=switch // 2)
    return addresses, names


@pytest.mark.parametrize(
    ("product", "family"),
    [
        ("trn2.48xlarge", "trn2"),
        ("trn2u.48xlarge", "trn2u"),
        ("trn3-dev0.48xlarge", "trn3-dev0"),
        ("p5en.48xlarge", "p5en"),
        ("p6-b200.48xlarge", "p6-b200"),
        ("Standard PC (i440FX + PIIX, 1996)", None),
        ("PowerEdge R740.2", None),
        ("", None),
    ],
)
def test_the_family_is_what_the_instance_type_begins_with(tree: Tree, product: str, family: str | None) -> None:
    tree.is_a(product)
    assert instance_family(tree.sys) == family


def test_what_is_no_instance_has_no_family_and_no_cards(tree: Tree) -> None:
    assert instance_family(tree.sys) is None
    assert efa_nics(tree.sys) == ()
    assert neuron_nics(0, "0000:c9:00.0", "trn2", sys=tree.sys) == ()
    assert cuda_nics("0000:53:00.0", 0, "p5en", sys=tree.sys) == ()


def test_all_cards_are_efas_that_have_a_driver(tree: Tree) -> None:
    second, first = tree.nic("b4:00.0"), tree.nic("10:1a.0")
    tree.add("05:00.0", ENA)
    tree.add("c9:00.0", EFA)
    assert efa_nics(tree.sys) == (first, second) == ("rdmap16s26", "rdmap180s0")


@pytest.mark.parametrize(
    ("family", "table", "index", "name"),
    [
        ("trn1", "trn1", 1, "rdmap16s26"),
        ("trn1", "trn1", 12, "rdmap16s25"),
        ("trn1n", "trn1n", 0, "rdmap16s23"),
        ("trn1n", "trn1n", 15, "rdmap160s24"),
        ("trn2", "trn2", 0, "rdmap201s0"),
        ("trn2u", "trn2", 1, "rdmap180s0"),
        ("trn2e", "trn2", 15, "rdmap246s0"),
        ("trn3", "trn3", 2, "rdmap168s0"),
        ("trn3s", "trn3", 0, "rdmap190s0"),
        ("trn3-dev1", "trn3pds", 0, "rdmap169s0"),
    ],
)
def test_the_published_table_names_a_neuron_devices_card(
    tree: Tree, family: str, table: str, index: int, name: str
) -> None:
    for bdf in sorted(set(TABLES[table].split())):
        tree.nic(bdf)
    assert neuron_nics(index, None, family, sys=tree.sys) == (name,)
    assert neuron_nics(16, None, family, sys=tree.sys) == ()
    assert neuron_nics(-1, None, family, sys=tree.sys) == ()
    assert neuron_nics(index, None, "trn9", sys=tree.sys) == ()


@pytest.mark.parametrize(("family", "cards"), [("trn1", 8), ("trn1n", 16), ("trn2", 16), ("trn3", 16), ("trn3pds", 16)])
def test_a_table_shares_all_cards_evenly_between_16_devices(family: str, cards: int) -> None:
    table = TABLES[family].split()
    assert len(table) == 16
    assert {table.count(bdf) for bdf in table} == {16 // cards}


def test_what_the_runtime_says_comes_before_the_table(tree: Tree) -> None:
    by_table, said = tree.nic("c9:00.0"), tree.nic("b4:00.0")
    for bdf in ("0000:b4:00.0", "b4:00.0", "0000:B4:00.0\n"):
        assert neuron_nics(0, bdf, "trn2", sys=tree.sys) == (said,)
    # A card that isn't here (a container with some of them), no card at all, and nonsense.
    for bdf in ("0000:b3:00.0", "", "c9", "../../x"):
        assert neuron_nics(0, bdf, "trn2", sys=tree.sys) == (by_table,)
    tree.add("05:00.0", ENA)
    assert neuron_nics(0, "0000:05:00.0", "trn2", sys=tree.sys) == (by_table,)


def test_the_only_neuron_device_takes_the_card_that_is_nearest(tree: Tree) -> None:
    tree.nic("31:00.0", "pci0000:30", "0000:30:01.0")
    near = tree.nic("21:00.0", "pci0000:20", "0000:20:01.0")
    tree.add("22:00.0", TRAINIUM, "pci0000:20", "0000:20:01.0")
    assert neuron_nics(0, None, "trn2", sys=tree.sys) == (near,)
    tree.add("32:00.0", TRAINIUM, "pci0000:30", "0000:30:01.0")  # Two: which one is number 0?
    assert neuron_nics(0, None, None, sys=tree.sys) == ()


def test_a_logical_core_is_on_the_device_that_has_its_physical_cores() -> None:
    assert [neuron_device_of(core, 2) for core in (0, 3, 4, 7, 63)] == [0, 0, 1, 1, 15]
    assert [neuron_device_of(core, 1) for core in (0, 7, 8, 127)] == [0, 0, 1, 15]


@pytest.mark.parametrize("family", ["p5", "p5e"])
def test_p5_gives_each_gpu_the_four_cards_of_its_switch(tree: Tree, family: str) -> None:
    gpus, cards = gpus_below_switches(tree, 1, 4)
    for index, gpu in enumerate(gpus):
        assert cuda_nics(f"00000000:{gpu.upper()}", index, family, sys=tree.sys) == tuple(cards[index])


def test_p5en_gives_even_gpus_the_first_two_of_their_group_and_odd_ones_the_others(tree: Tree) -> None:
    gpus, cards = gpus_below_switches(tree, 2, 4)
    tree.add("0a:00.0", SWITCH_OF_NVIDIA)
    found = [cuda_nics(f"0000:{gpu}", index, "p5en", sys=tree.sys) for index, gpu in enumerate(gpus)]
    assert found == [tuple(cards[index // 2][index % 2 * 2 :][:2]) for index in range(8)]
    assert len({name for nics in found for name in nics}) == 16
    # CUDA_VISIBLE_DEVICES numbers them anew, and that changes nothing.
    assert cuda_nics(f"0000:{gpus[5]}", 0, "p5en", sys=tree.sys) == found[5]


def test_p5en_in_a_container_with_one_gpu_goes_by_its_number(tree: Tree) -> None:
    _, cards = gpus_below_switches(tree, 0, 4)
    tree.add("68:00.0", GPU, "pci0000:40", "0000:40:01.0")
    assert cuda_nics("0000:68:00.0", 6, "p5en", sys=tree.sys) == tuple(cards[0][:2])
    assert cuda_nics("0000:68:00.0", 7, "p5en", sys=tree.sys) == tuple(cards[0][2:])


def test_p6_b200_has_a_card_for_each_gpu_and_p6_b300_two(tmp_path: Path) -> None:
    tree = Tree(tmp_path / "b200")
    gpus, cards = gpus_below_switches(tree, 2, 2)
    found = [cuda_nics(gpu, index, "p6-b200", sys=tree.sys) for index, gpu in enumerate(gpus)]
    assert found == [(cards[index // 2][index % 2],) for index in range(8)]
    tree = Tree(tmp_path / "b300")
    gpus, cards = gpus_below_switches(tree, 1, 2)
    found = [cuda_nics(gpu, index, "p6-b300", sys=tree.sys) for index, gpu in enumerate(gpus)]
    assert found == [tuple(cards[index]) for index in range(4)]


def test_an_unknown_family_goes_by_the_distance_over_pci(tree: Tree) -> None:
    gpus, cards = gpus_below_switches(tree, 2, 3)
    assert cuda_nics(gpus[2], 2, None, sys=tree.sys) == tuple(cards[1])
    assert cuda_nics(gpus[2], 2, "g9", sys=tree.sys) == tuple(cards[1])


def test_too_few_cards_below_the_switch_are_made_up_for_from_the_same_node_of_memory(tree: Tree) -> None:
    tree.nic("11:00.0", "pci0000:10", "0000:10:01.0", node=1)
    near = tree.nic("21:00.0", "pci0000:20", "0000:20:01.0", node=0)
    next_nearest = tree.nic("31:00.0", "pci0000:30", "0000:30:01.0", node=0)
    tree.add("22:00.0", GPU, "pci0000:20", "0000:20:01.0", node=0)
    assert cuda_nics("0000:22:00.0", 0, "p5en", sys=tree.sys) == (near, next_nearest)
    assert cuda_nics("0000:22:00.0", 0, None, sys=tree.sys) == (near,)
