"""The bench of the conversion has a row for each format, direction and device."""

from holdfast_bench.measure import convert


def test_each_format_and_device_has_a_row_for_each_direction(monkeypatch):
    monkeypatch.setattr(convert, "BATCH_BYTES", 4 << 20)
    monkeypatch.setattr(convert, "LAYERS", 2)
    rows = [*convert.thread_rows(1), *convert.device_rows(1)]
    formats = ("vec.bfloat16", "vec.float32", "amx.bfloat16", "nhd.bfloat16", "hnd.bfloat16")
    wanted = [f"convert.{name}.{what}" for name in formats for what in ("save", "load")]
    wanted += [
        f"convert.device.{what}{busy}" for what in ("save", "load") for busy in ("", ".busy")
    ]
    assert [row.what for row in rows] == wanted
    assert {row.what for row in rows if row.goal} == set(wanted[:6])
