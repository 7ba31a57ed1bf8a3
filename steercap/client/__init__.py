"""Client of a model that `steercap serve` has open in another process, with the methods of a local model.

    from steercap import CaptureSpec, SteerModel

    async with SteerModel.connect("http://gpu-box:8000", api_key="...") as model:
        text, handle = await model.generate("Hello", capture=CaptureSpec(layers=[4]))
        rows = (await handle.fetch()).captures[4]

It needs `pip install 'steercap[client]'` and neither vLLM nor a GPU. `steercap.sync.SteerModel.connect` is the same
without `await`.
"""

from steercap.client.model import RemoteModel

__all__ = ["RemoteModel"]
