"""Runs doctor, layout and bench link as a user does. Usage: fabric_cli_test.py BINARY [unittest arguments]"""

import json
import os
import socket
import subprocess
import sys
import tempfile
import unittest
import xml.dom.minidom

BINARY = os.path.abspath(sys.argv[1])


def run_cli(*arguments, expect=0, env=None):
    done = subprocess.run(
        [BINARY, *arguments], capture_output=True, timeout=300, check=False, env={**os.environ, **(env or {})}
    )
    if done.returncode != expect:
        raise AssertionError(f"{arguments}: exit code {done.returncode}, not {expect}: {done.stderr.decode()}")
    return done


def run_processes(ranks, *arguments):
    """One process a rank, as torchrun starts them; the standard output of each, in rank order."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {**os.environ, "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    started = [
        subprocess.Popen(
            [BINARY, *arguments, "--processes", "--backend", "cpu"],
            env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        for rank in range(ranks)
    ]
    ended = [process.communicate(timeout=300) for process in started]
    for process, (_, words) in zip(started, ended):
        if process.returncode != 0:
            raise AssertionError(f"{arguments}: exit code {process.returncode}: {words.decode()}")
    return [output for output, _ in ended]


def has_gpu():
    return json.loads(run_cli("doctor", "--ranks", "1", "--bytes", "8", "--json").stdout)["gpus"]["usable"]


class Doctor(unittest.TestCase):
    def test_every_transport_reaches_every_pair(self):
        report = json.loads(
            run_cli("doctor", "--backend", "cpu", "--ranks", "3", "--bytes", "65536", "--json").stdout
        )
        self.assertTrue(report["ok"])
        self.assertEqual(report["rank_kind"], "threads")
        self.assertEqual(report["gpus"], {"usable": False, "reason": "--backend cpu"})
        self.assertEqual([t["transport"] for t in report["self_test"]], ["copy_engine", "sm", "direct"])
        for transport in report["self_test"]:
            self.assertEqual(len(transport["pairs"]), 6)
            self.assertEqual(transport["moved_bytes"], 6 * 3 * 65536)
            self.assertEqual(transport["asked_bytes"], transport["moved_bytes"])

    def test_words(self):
        text = run_cli("doctor", "--backend", "cpu", "--ranks", "1", "--bytes", "4096").stdout.decode()
        self.assertEqual(text.count("ok, signals follow data"), 3)

    def test_processes(self):
        first, second = run_processes(2, "doctor", "--bytes", "4096", "--json")
        self.assertEqual(second, b"")
        report = json.loads(first)
        self.assertTrue(report["ok"])
        self.assertEqual((report["ranks"], report["rank_kind"]), (2, "processes"))
        self.assertEqual(report["rank_source"], "torchrun")
        self.assertEqual(len(report["self_test"]), 3)

    def test_the_source_that_won_is_printed(self):
        mpi = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}
        torchrun = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
        for env, source in ((mpi, "mpi"), ({**mpi, **torchrun}, "torchrun")):
            done = run_cli("doctor", "--processes", "--backend", "cpu", "--bytes", "8", env=env)
            self.assertIn(f"rank 0 of 1 (local rank 0) from {source}, rendezvous at".encode(), done.stderr)

    def test_a_missing_gpu_is_said_and_never_passed_over(self):
        if has_gpu():
            self.skipTest("this machine has a usable GPU")
        for command in (("doctor",), ("bench", "link")):
            done = run_cli(*command, "--backend", "cuda", "--json", expect=77)
            self.assertEqual(json.loads(done.stdout)["error"]["kind"], "unsupported")
            self.assertIn(b"--backend cuda: ", done.stderr)
        self.assertIn("GPUs: not used: ", run_cli("doctor", "--bytes", "8").stdout.decode())

    def test_refusals(self):
        run_cli("doctor", "--ranks", "0", expect=2)
        run_cli("doctor", "--ranks", "65", expect=2)
        run_cli("doctor", "--ranks", "2", "--processes", expect=2)
        run_cli("doctor", "--backend", "tpu", expect=2)
        done = run_cli("doctor", "--bytes", "12", "--json", expect=1)
        error = json.loads(done.stdout)["error"]
        self.assertEqual(error["kind"], "invalid_argument")
        self.assertIn("multiple of 8", error["message"])
        done = run_cli("doctor", expect=1, env={"PENSTOCK_DEADLINE_S": "soon"})
        self.assertIn(b"PENSTOCK_DEADLINE_S='soon'", done.stderr)


class Layout(unittest.TestCase):
    def test_regions_follow_each_other(self):
        layout = json.loads(run_cli("layout", "all_reduce", "--ranks", "4", "--elements", "300", "--json").stdout)
        self.assertEqual([r["name"] for r in layout["regions"]], ["one_shot", "reduce", "gather"])
        # 100 packets of 16 bytes, from each of 4 ranks, twice
        self.assertEqual(layout["regions"][0]["bytes"], 2 * 4 * 100 * 16)
        end = 0
        for region in layout["regions"]:
            self.assertEqual(region["offset"] % region["alignment"], 0)
            self.assertGreaterEqual(region["offset"], end)
            end = region["offset"] + region["bytes"]
        self.assertGreaterEqual(layout["bytes"], end)

    def test_operators(self):
        layout = json.loads(run_cli("layout", "a2a-gemm", "--ranks", "4", "--sequence", "4096", "--json").stdout)
        self.assertEqual(layout["operator"], "a2a_gemm")
        chunks = next(r for r in layout["regions"] if r["name"] == "chunks")
        # two slots of a chunk from each of 4 ranks: 1024 rows of 2048 bf16
        self.assertEqual(chunks["bytes"], 2 * 4 * 1024 * 2048 * 2)
        done = run_cli("layout", "a2a-gemm", "--sequence", "100", "--json", expect=1)
        self.assertEqual(json.loads(done.stdout)["error"]["kind"], "invalid_argument")
        self.assertIn("moe_stage2", run_cli("layout", "moe-stage2").stdout.decode())

    def test_formulas_give_the_bytes(self):
        for arguments in (
            ("all_reduce", "--ranks", "3"),
            ("moe-stage2", "--tokens", "100", "--row-slack", "1.1"),
            ("moe-stage2", "--ranks", "3", "--experts", "24", "--bf16", "--direct"),
            ("a2a-gemm", "--fp8", "--sequence", "1056", "--hidden", "352"),
            ("a2a-gemm", "--ranks", "4", "--direct"),
            ("decode-layer", "--ranks", "2", "--rows", "3"),
        ):
            layout = json.loads(run_cli("layout", *arguments, "--json").stdout)
            for region in layout["regions"]:
                product = 1
                for factor in region["formula"].split(" x "):
                    product *= int(factor.split()[0])
                self.assertEqual(product, region["bytes"], (arguments, region))
            self.assertIn("bytes of each region", run_cli("layout", *arguments).stdout.decode())
        run_cli("layout", "a2a-gemm", "--ranks", "3", expect=2)

    def test_words_and_refusals(self):
        text = run_cli("layout", "all_reduce").stdout.decode()
        self.assertIn("digest", text)
        run_cli("layout", expect=2)
        run_cli("layout", "nothing_of_this_name", expect=2)
        run_cli("layout", "all_reduce", "--elements", "0", expect=2)


class BenchLink(unittest.TestCase):
    def test_lines_and_plot(self):
        with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
            plot = os.path.join(folder, "link.svg")
            done = run_cli(
                *("bench", "link", "--backend", "cpu", "--max-bytes", "16384", "--samples", "3"),
                *("--plot", plot, "--json"),
            )
            points = [json.loads(line) for line in done.stdout.splitlines()]
            link = [p for p in points if p["bench"] == "link"]
            self.assertEqual(len(link), 3 * 3 * 2)
            for point in link:
                self.assertTrue(point["correct"])
                self.assertLessEqual(point["p10_us"], point["median_us"])
                self.assertLessEqual(point["median_us"], point["p90_us"])
                self.assertEqual(point["moved_bytes"], 6 * point["bytes"])
            self.assertEqual({p["rows"] for p in points if p["bench"] == "all_reduce"}, {1, 2, 4, 8, 16})
            lines = xml.dom.minidom.parse(plot).getElementsByTagName("polyline")
            self.assertEqual(len(lines), 6)
            for line in lines:
                self.assertEqual(len(line.getAttribute("points").split()), 3)

    def test_processes(self):
        first, second = run_processes(2, "bench", "link", "--max-bytes", "4096", "--samples", "2", "--json")
        self.assertEqual(second, b"")
        points = [json.loads(line) for line in first.splitlines()]
        self.assertEqual(len(points), 3 * 2 + 10)
        self.assertEqual({p["rank_kind"] for p in points}, {"processes"})

    def test_words_and_refusals(self):
        text = run_cli(
            *("bench", "link", "--backend", "cpu", "--max-bytes", "4096", "--samples", "2", "--width", "30")
        ).stdout.decode()
        self.assertIn("copy_engine", text)
        self.assertIn("two_shot", text)
        run_cli("bench", expect=2)
        run_cli("bench", "link", "--ranks", "1", expect=2)
        run_cli("bench", "link", "--min-bytes", "8192", "--max-bytes", "4096", expect=2)
        run_cli("bench", "link", "--min-bytes", "12", "--max-bytes", "24", expect=1)
        run_cli(
            *("bench", "link", "--backend", "cpu", "--max-bytes", "4096", "--plot", "/nonexistent/link.svg"), expect=1
        )


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0], *sys.argv[2:]])
