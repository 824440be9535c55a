"""Available host memory, read from files as Linux writes them."""

from pathlib import Path

from slivertune.core.host_memory import available_host_bytes

GIB = 2**30


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="ascii")
    return root


MACHINE = {"proc/meminfo": f"MemTotal: 99999999 kB\nMemFree: 1 kB\nMemAvailable:   {32 * GIB // 1024} kB\n"}
SECOND = {
    "proc/self/cgroup": "0::/user/job\n",
    "sys/fs/cgroup/user/memory.max": f"{20 * GIB}\n",
    "sys/fs/cgroup/user/memory.current": f"{6 * GIB}\n",
    "sys/fs/cgroup/user/memory.stat": f"anon 1\ninactive_file {2 * GIB}\n",
    "sys/fs/cgroup/user/job/memory.max": "max\n",
    "sys/fs/cgroup/user/job/memory.current": "1\n",
}
FIRST = {
    "proc/self/cgroup": "5:cpu:/a\n3:memory,hugetlb:/docker/x\n",
    "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
    "sys/fs/cgroup/memory/memory.usage_in_bytes": "5\n",
    "sys/fs/cgroup/memory/docker/x/memory.limit_in_bytes": f"{8 * GIB}\n",
    "sys/fs/cgroup/memory/docker/x/memory.usage_in_bytes": f"{3 * GIB}\n",
}


def test_the_machines_memory_counts_where_no_group_limits_it(tmp_path: Path) -> None:
    assert available_host_bytes(write(tmp_path, MACHINE)) == 32 * GIB


def test_the_lowest_limit_of_the_control_groups_counts_less_what_they_use_but_for_caches(tmp_path: Path) -> None:
    assert available_host_bytes(write(tmp_path, {**MACHINE, **SECOND})) == 16 * GIB


def test_control_groups_of_the_first_version_count_too(tmp_path: Path) -> None:
    assert available_host_bytes(write(tmp_path, {**MACHINE, **FIRST})) == 5 * GIB


def test_a_container_sees_its_group_as_the_top(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/\n",
        "sys/fs/cgroup/memory.max": f"{GIB}\n",
        "sys/fs/cgroup/memory.current": "24\n",
    }
    assert available_host_bytes(write(tmp_path, {**MACHINE, **files})) == GIB - 24


def test_nothing_known_is_none_and_this_machine_has_some(tmp_path: Path) -> None:
    assert available_host_bytes(tmp_path) is None
    here = available_host_bytes()
    assert here is None or here > 0
