"""Runs the operators' benchmarks on CPU ranks as a user does. Usage: operator_bench_test.py BINARY [unittest arguments]"""

import json
import os
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


def lines_of(*arguments, **options):
    return [json.loads(line) for line in run_cli(*arguments, "--json", **options).stdout.splitlines()]


class MoeStage2(unittest.TestCase):
    QUICK = ("bench", "moe-stage2", "--backend", "cpu", "--rounds", "2", "--warm-up", "0")
    VARIANTS = ["gemm alone", "combine alone", "unfused", "copy_engine", "sm", "direct"]

    def test_every_variant_is_checked_and_counted(self):
        with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
            svg = os.path.join(folder, "moe.svg")
            points = lines_of(*self.QUICK, "--tokens", "4,8", "--ranks", "2", "--check", "--svg", svg)
            curves = xml.dom.minidom.parse(svg).getElementsByTagName("polyline")
            self.assertEqual([len(c.getAttribute("points").split()) for c in curves], [2] * 4)
        self.assertEqual([p["variant"] for p in points], self.VARIANTS * 2)
        for point in points:
            self.assertEqual(point["samples"], 2)
            self.assertLessEqual(point["p10_us"], point["median_us"])
            if point["variant"] in self.VARIANTS[:2]:
                self.assertIsNone(point["correct"])
                continue
            self.assertTrue(point["correct"])
            self.assertEqual(point["differing_rows"], 0)
            self.assertLess(point["relative_error"], 5e-2)
            moved, stored = point["moved_bytes"], point["direct_bytes"]
            self.assertEqual(moved > 0, point["variant"] != "direct")
            self.assertEqual(stored > 0, point["variant"] == "direct")

    def test_what_is_too_much_is_refused_before_any_work(self):
        huge = run_cli(*self.QUICK, "--tokens", "16777216", "--ranks", "8", expect=2)
        self.assertIn(b"--max-minutes", huge.stderr)
        run_cli(*self.QUICK, "--tokens", "4", "--max-minutes", "nan", expect=2)
        run_cli(*self.QUICK, "--tokens", "4", "--remote-fraction", "nan", expect=2)

    def test_remote_fraction_is_met(self):
        # Four of top-4 slots, three quarters of them away: every token has exactly three.
        points = lines_of(*self.QUICK, "--tokens", "8", "--remote-fraction", "0.75", "--wire", "bf16", "--check")
        self.assertEqual({p["remote_fraction"] for p in points}, {0.75})
        self.assertEqual({p["wire"] for p in points}, {"bf16"})
        self.assertLess(max(p.get("relative_error", 0) for p in points), 1e-2)

    def test_custom_shape_and_words(self):
        sizes = ("--hidden", "128", "--intermediate", "128", "--top-k", "2", "--experts-per-rank", "3")
        done = run_cli(*self.QUICK, "--shape", "custom", "--tokens", "5", "--ranks", "1", *sizes, "--check")
        text = done.stdout.decode()
        self.assertIn("copy_engine *", text)
        self.assertEqual(text.count(" ok\n"), 4)

    def test_trace_names_what_each_rank_does(self):
        with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
            trace = os.path.join(folder, "moe.trace.json")
            run_cli(*self.QUICK, "--tokens", "8", "--ranks", "3", "--trace", trace)
            with open(trace, encoding="utf-8") as file:
                events = json.load(file)["traceEvents"]
        for rank in (0, 1, 2):
            names = [e["name"].split(" ")[0].rstrip(",") for e in events if e["pid"] == rank and e["ph"] != "M"]
            self.assertEqual(names.count("arrival"), 2)
            self.assertEqual(names.count("combine"), 1)
            self.assertGreater(names.count("multiply"), 0)
            self.assertEqual(names.count("multiply"), names.count("send"))

    def test_refusals_name_the_reason(self):
        for arguments, words in (
            (("--graph",), b"use --backend cuda"),
            (("--hidden", "256"), b"--shape custom"),
            (("--shape", "custom"), b"--tokens"),
            (("--shape", "glm5"), b"--max-minutes"),
            (("--ranks", "9"), b"1 to 8"),
            (("--tokens", "0"), b"0"),
            (("--wire", "fp4"), b"fp4"),
            (("--transport", "carrier_pigeon"), b"carrier_pigeon"),
            (("--routing", "burst", "--remote-fraction", "0.5"), b"excludes"),
        ):
            done = run_cli("bench", "moe-stage2", "--backend", "cpu", *arguments, expect=2)
            self.assertIn(words, done.stderr, arguments)

    def test_a_bad_deadline_is_refused(self):
        done = run_cli(*self.QUICK, "--tokens", "4", expect=1, env={"PENSTOCK_DEADLINE_S": "soon"})
        self.assertIn(b"PENSTOCK_DEADLINE_S='soon'", done.stderr)


class Tune(unittest.TestCase):
    QUICK = ("--backend", "cpu", "--rounds", "3", "--warm-up", "0")

    def test_auto_takes_what_was_stored_for_this_machine_and_shape(self):
        with tempfile.TemporaryDirectory(prefix="penstock-tune-") as folder:
            home = {"XDG_CONFIG_HOME": folder}
            table = json.loads(run_cli("tune", *self.QUICK, "--tokens", "4,8", "--json", env=home).stdout)
            for point in table["points"]:
                times = {kind: point[f"{kind}_us"] for kind in ("copy_engine", "sm", "direct")}
                self.assertEqual(times[point["transport"]], min(times.values()))
            with open(table["file"], encoding="utf-8") as file:
                stored = json.load(file)
            self.assertEqual(len(stored["crossovers"]), 1)
            self.assertEqual([p["tokens"] for p in stored["crossovers"][0]["points"]], [4, 8])
            # A second run takes the place of the first; another wire is an entry of its own.
            run_cli("tune", *self.QUICK, "--tokens", "4", env=home)
            run_cli("tune", *self.QUICK, "--tokens", "4", "--wire", "bf16", env=home)
            with open(table["file"], encoding="utf-8") as file:
                self.assertEqual(len(json.load(file)["crossovers"]), 2)
            for kind in ("sm", "direct", "copy_engine"):
                stored["crossovers"][0]["points"] = [{"tokens": 4, "transport": kind}]
                with open(table["file"], "w", encoding="utf-8") as file:
                    json.dump(stored, file)
                points = lines_of(
                    "bench", "moe-stage2", *self.QUICK, "--tokens", "8", "--transport", "auto", env=home
                )
                self.assertEqual({p["transport"] for p in points}, {kind})
            with open(table["file"], "w", encoding="utf-8") as file:
                file.write("{}")
            done = run_cli("tune", *self.QUICK, "--tokens", "4", expect=1, env=home)
            self.assertIn(b"remove it and tune again", done.stderr)


class A2aGemm(unittest.TestCase):
    QUICK = ("bench", "a2a-gemm", "--backend", "cpu", "--rounds", "2", "--warm-up", "0")
    VARIANTS = ["gemm alone", "unfused", "copy_engine", "sm", "direct", "auto"]

    def test_every_variant_is_checked_and_counted(self):
        with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
            svg = os.path.join(folder, "a2a.svg")
            points = lines_of(*self.QUICK, "--hidden", "64", "--seq", "64,128", "--check", "--svg", svg)
            curves = xml.dom.minidom.parse(svg).getElementsByTagName("polyline")
            self.assertEqual([len(c.getAttribute("points").split()) for c in curves], [2] * 5)
        self.assertEqual([p["variant"] for p in points], self.VARIANTS * 2)
        for point in points:
            if point["variant"] == "gemm alone":
                self.assertIsNone(point["correct"])
                continue
            self.assertTrue(point["correct"])
            self.assertEqual(point["differing_rows"], 0)
            self.assertLess(point["relative_error"], 1e-2)
            # One chunk of M rows of K / 2 bf16 leaves each of the two ranks.
            self.assertEqual(point["moved_bytes"] + point["direct_bytes"], point["m"] * point["k"] // 2 * 2)

    def test_trace_shows_arrivals_before_the_products_that_need_them(self):
        with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
            trace = os.path.join(folder, "a2a.trace.json")
            run_cli(*self.QUICK, "--hidden", "64", "--seq", "1024", "--row-block-rows", "256", "--trace", trace)
            with open(trace, encoding="utf-8") as file:
                events = json.load(file)["traceEvents"]
        for rank in (0, 1):
            mine = [e for e in events if e["pid"] == rank and e["ph"] != "M"]
            arrivals = {e["args"]["row_block"]: e["ts"] for e in mine if e["name"].startswith("arrival")}
            products = [e for e in mine if e["name"].startswith("multiply")]
            self.assertEqual(set(arrivals), {0, 1})
            self.assertEqual(len(products), 4)  # two row blocks of two chunks
            for product in products:
                if product["args"]["peer"] != rank:
                    # The watcher sees a signal at most a nap later than the operator.
                    self.assertLess(arrivals[product["args"]["row_block"]], product["ts"] + 50000)
            self.assertEqual(len([e for e in mine if e["name"].startswith("send")]), 2)

    def test_formats_ranks_and_words(self):
        for ranks, fmt in (("1", "bf16"), ("4", "fp8")):
            done = run_cli(*self.QUICK, "--hidden", "64", "--seq", "64", "--ranks", ranks, "--format", fmt, "--check")
            self.assertEqual(done.stdout.decode().count(" ok\n"), 5)

    def test_mirror_is_checked_and_says_whether_fusing_paid(self):
        mirror = (*self.QUICK, "--mirror", "--hidden", "96", "--seq", "96", "--ranks", "3", "--check")
        for point in lines_of(*mirror, "--format", "fp8"):
            self.assertTrue(point["mirror"])
            self.assertEqual((point["m"], point["n"], point["k"]), (32, 96, 96))
            if point["variant"] != "gemm alone":
                self.assertTrue(point["correct"])
                self.assertLess(point["relative_error"], 1e-2)
                # Two parts of M rows of N / 3 bf16 leave each rank.
                self.assertEqual(point["moved_bytes"] + point["direct_bytes"], 2 * 32 * 32 * 2)
        text = run_cli(*mirror).stdout.decode()
        self.assertRegex(text, r"fusing (pays|does not pay) here: unfused takes [0-9.]+ of its time; auto fuses\n")

    def test_refusals_name_the_reason(self):
        for arguments, words in (
            (("--graph",), b"use --backend cuda"),
            (("--mirror", "--trace", "t.json"), b"leave one out"),
            (("--hidden", "100", "--ranks", "3"), b"multiples of --ranks 3"),
            (("--hidden", "40"), b"16"),
            (("--hidden", "8192", "--seq", "65536"), b"--max-minutes"),
            (("--format", "fp4"), b"fp4"),
        ):
            done = run_cli("bench", "a2a-gemm", "--backend", "cpu", *arguments, expect=2)
            self.assertIn(words, done.stderr, arguments)


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0], *sys.argv[2:]])
