"""Logs of SGLang, shortened.

`CPU` and the deaths marked so are what a real 0.5.23 printed on a CPU. What only a GPU prints was put together from the
format strings of `sglang/srt/model_executor/model_runner_components/cuda_graph_setup.py`,
`speculative/eagle_worker_v2.py` and `model_loader/weight_utils.py` (0.5.23), and `model_executor/model_runner.py`,
`speculative/eagle_worker.py` and `mem_cache/memory_pool.py` (0.5.8).
"""

from __future__ import annotations

CPU = """\
/venv/sglang/srt/layers/quantization/awq/awq.py:53: UserWarning: Only CUDA, HIP and XPU support AWQ currently.
[2026-11-30 22:14:57] Max running requests is reset to 48 for speculative decoding.
[2026-11-30 22:15:00] server_args={'model_path': '/models/target', 'device': 'cpu', 'speculative_algorithm': 'EAGLE3', 'speculative_num_steps': 3}
[2026-11-30 22:15:14] Init parallel begin.
[2026-11-30 22:15:14] Init parallel ends. elapsed=0.08 s
[2026-11-30 22:15:15] Ignore import error when loading sglang.srt.models.midashenglm: No module named 'torchaudio'
[2026-11-30 22:15:16] Load weight begin. avail mem=22.17 GB
Multi-thread loading shards:   0% Completed | 0/1 [00:00<?, ?it/s]\rMulti-thread loading shards: 100% Completed | 1/1 [00:00<00:00, 30.55it/s]
[2026-11-30 22:15:16] Load weight end. elapsed=0.11 s, type=LlamaForCausalLM, avail mem=22.16 GB, mem usage=0.01 GB.
[2026-11-30 22:15:16] Load weight begin. avail mem=22.15 GB
Multi-thread loading shards:   0% Completed | 0/1 [00:00<?, ?it/s]\rMulti-thread loading shards: 100% Completed | 1/1 [00:00<00:00, 243.08it/s]
[2026-11-30 22:15:16] Load weight end. elapsed=0.02 s, type=LlamaForCausalLMEagle3, avail mem=22.15 GB, mem usage=0.00 GB.
[2026-11-30 22:15:17] KV Cache is allocated. dtype: torch.float32, #tokens: 4096, K size: 0.01 GB, V size: 0.01 GB
[2026-11-30 22:15:17] Memory pool end. avail mem=22.01 GB
[2026-11-30 22:15:17] Disable prefill CUDA graph because cuda_graph_config resolved prefill.backend='disabled' (e.g. via --cuda-graph-backend-prefill=disabled or auto-disable rules).
[2026-11-30 22:15:18] Engine startup timings (s): load_weight=0.13, kv_cache_allocation=1.41, scheduler_e2e=3.64, cuda_graph={prefill=0.00, decode=0.00, target_verify=0.00, draft_prefill=0.00, draft_decode=0.00, draft_extend=0.00}, tokenizer_e2e=17.20
[2026-11-30 22:15:18] INFO:     Started server process [6838]
[2026-11-30 22:15:18] OpenAI Responses API (/v1/responses) disabled: OpenAIServingResponses init failed (ModuleNotFoundError: No module named 'openai_harmony')
[2026-11-30 22:15:18] INFO:     Uvicorn running on http://127.0.0.1:36771 (Press CTRL+C to quit)
[2026-11-30 22:15:18] INFO:     127.0.0.1:44972 - "GET /ready HTTP/1.1" 503 Service Unavailable
[2026-11-30 22:15:19] INFO:     127.0.0.1:44998 - "GET /model_info HTTP/1.1" 200 OK
[2026-11-30 22:15:19] Prefill batch, #new-seq: 1, #new-token: 8, #cached-token: 0, token usage: 0.00, #running-req: 0
[2026-11-30 22:15:19] INFO:     127.0.0.1:45012 - "POST /generate HTTP/1.1" 200 OK
[2026-11-30 22:15:19] INFO:     127.0.0.1:45024 - "POST /freeze_gc HTTP/1.1" 200 OK
[2026-11-30 22:15:19] The server is fired up and ready to roll!
"""  # noqa: E501

GPU = """\
[2026-11-30 10:00:00] server_args={'model_path': '/models/kimi', 'device': 'cuda', 'tp_size': 8, 'speculative_algorithm': 'EAGLE3', 'speculative_num_steps': 3}
[2026-11-30 10:00:20 TP0] Load weight begin. avail mem=78.00 GB
[2026-11-30 10:00:21 TP3] Load weight begin. avail mem=78.00 GB
Loading safetensors checkpoint shards:   0% Completed | 0/64 [00:00<?, ?it/s]
Loading safetensors checkpoint shards:  42% Completed | 27/64 [03:05<04:12,  6.82s/it]
[2026-11-30 10:08:00 TP3] Load weight end. elapsed=460.00 s, type=KimiK25ForConditionalGeneration, avail mem=8.00 GB, mem usage=70.00 GB.
Loading safetensors checkpoint shards: 100% Completed | 64/64 [08:10<00:00,  7.66s/it]
[2026-11-30 10:08:30 TP0] Load weight end. elapsed=490.00 s, type=KimiK25ForConditionalGeneration, avail mem=8.00 GB, mem usage=70.00 GB.
[2026-11-30 10:08:40 TP0] Load weight begin. avail mem=8.00 GB
Loading safetensors checkpoint shards: 100% Completed | 1/1 [00:04<00:00,  4.00s/it]
[2026-11-30 10:08:45 TP0] Load weight end. elapsed=5.00 s, type=LlamaForCausalLMEagle3, avail mem=7.00 GB, mem usage=1.00 GB.
[2026-11-30 10:08:50 TP0] KV Cache is allocated. dtype: torch.bfloat16, #tokens: 90000, KV size: 5.00 GB
[2026-11-30 10:08:50 TP0] Memory pool end. avail mem=2.00 GB
[2026-11-30 10:08:51 TP0] Capture target verify CUDA graph begin. backend=full, num_tokens_per_req=4, avail mem=2.00 GB
  0%|          | 0/12 [00:00<?, ?it/s]\rCapturing batches (bs=48 avail_mem=1.90 GB):   0%|          | 0/12 [00:00<?, ?it/s]\rCapturing batches (bs=40 avail_mem=1.80 GB):  25%|##5       | 3/12 [00:30<01:30, 10.00s/it]
Capturing batches (bs=1 avail_mem=1.20 GB): 100%|##########| 12/12 [02:00<00:00, 10.00s/it]
[2026-11-30 10:10:55 TP0] Capture target verify CUDA graph end. bs=[1, 2, 4], elapsed=124.00 s, mem usage=0.80 GB, avail mem=1.20 GB.
[2026-11-30 10:10:56 TP0] Capture draft decode CUDA graph begin. backend=full, num_tokens_per_req=1, bs=[1, 2, 4], avail mem=1.20 GB
[2026-11-30 10:11:06 TP0] Capture draft decode CUDA graph end. elapsed=10.00 s, mem usage=0.10 GB, avail mem=1.10 GB.
[2026-11-30 10:11:07 TP0] Capture draft extend CUDA graph begin. backend=full, num_tokens_per_req=4, bs=[1, 2, 4], avail mem=1.10 GB
[2026-11-30 10:11:17 TP0] Capture draft extend CUDA graph end. elapsed=10.00 s, mem usage=0.10 GB, avail mem=1.00 GB.
[2026-11-30 10:11:20] INFO:     Started server process [100]
[2026-11-30 10:11:20] INFO:     Uvicorn running on http://0.0.0.0:30000 (Press CTRL+C to quit)
[2026-11-30 10:11:25] INFO:     127.0.0.1:45012 - "POST /generate HTTP/1.1" 200 OK
[2026-11-30 10:11:30] The server is fired up and ready to roll!
"""  # noqa: E501

OLD = """\
[2026-02-10 09:00:00] server_args=ServerArgs(model_path='/models/llama', device='cuda', disable_cuda_graph=False, speculative_algorithm='EAGLE3', speculative_num_steps=3)
[2026-02-10 09:00:10] Load weight begin. avail mem=78.00 GB
[2026-02-10 09:00:20] Load weight end. type=LlamaForCausalLM, dtype=torch.bfloat16, avail mem=62.00 GB, mem usage=16.00 GB.
[2026-02-10 09:00:21] KV Cache is allocated. #tokens: 90000, K size: 20.00 GB, V size: 20.00 GB
[2026-02-10 09:00:21] Memory pool end. avail mem=20.00 GB
[2026-02-10 09:00:22] Capture cuda graph begin. This can take up to several minutes. avail mem=20.00 GB
[2026-02-10 09:00:42] Capture cuda graph end. Time elapsed: 20.00 s. mem usage=1.00 GB. avail mem=19.00 GB.
[2026-02-10 09:00:43] Load weight begin. avail mem=19.00 GB
[2026-02-10 09:00:44] Load weight end. type=LlamaForCausalLMEagle3, dtype=torch.bfloat16, avail mem=18.00 GB, mem usage=1.00 GB.
[2026-02-10 09:00:45] Capture draft cuda graph begin. This can take up to several minutes. avail mem=18.00 GB
[2026-02-10 09:00:55] Capture draft cuda graph end. Time elapsed: 10.00 s. mem usage=0.10 GB. avail mem=17.90 GB.
[2026-02-10 09:00:56] Capture draft extend cuda graph begin. This can take up to several minutes. avail mem=17.90 GB
[2026-02-10 09:01:06] Capture draft extend cuda graph end. Time elapsed: 10.00 s. mem usage=0.10 GB. avail mem=17.80 GB.
[2026-02-10 09:01:10] INFO:     Started server process [100]
[2026-02-10 09:01:15] The server is fired up and ready to roll!
"""  # noqa: E501

LOADING = "\n".join(GPU.splitlines()[:5]) + "\n"
"""27 of 64 shards read."""

_BEGUN = "\n".join(GPU.splitlines()[:13]) + "\n"
_RAISED = "[2026-11-30 10:09:00 TP0] Scheduler hit an exception: Traceback (most recent call last):\n"
_FOLLOWED = """\
  File "/usr/lib/python3.12/multiprocessing/connection.py", line 399, in _recv
    raise EOFError
EOFError

During handling of the above exception, another exception occurred:

RuntimeError: Rank 0 scheduler died during initialization (exit code: 255). If exit code is -9 (SIGKILL), a common cause is the OS OOM killer. Run `dmesg -T | grep -i oom` to check.
"""  # noqa: E501

DEATHS = {
    # Printed by 0.5.23 on a CPU.
    "start.port_in_use": CPU.split("[2026-11-30 22:15:18] INFO:     Uvicorn")[0]
    + "[2026-11-30 22:16:31] ERROR:    [Errno 98] error while attempting to bind on address ('127.0.0.1', 43089): "
    "address already in use\n[2026-11-30 22:16:31] INFO:     Waiting for application shutdown.\n",
    "start.context": CPU.split("[2026-11-30 22:15:17]")[0]
    + _RAISED
    + "ValueError: Warning: Target model's context_length (2048) is greater than the derived context_length (256). "
    "This may lead to incorrect model outputs or CUDA errors.\n\n" + _FOLLOWED,
    "start.no_weights": CPU.split("[2026-11-30 22:15:17]")[0]
    + _RAISED
    + "RuntimeError: Cannot find any model weights with `/models/target`\n\n"
    + _FOLLOWED,
    "start.architecture": CPU.split("[2026-11-30 22:15:16]")[0]
    + _RAISED
    + "ValueError: Cannot find model module. 'NoSuchForCausalLM' is not a registered model in the Transformers "
    "library\n" + _FOLLOWED,
    "start.missing_file": "Traceback (most recent call last):\nOSError: Repo id must be in the form 'repo_name' or "
    "'namespace/repo_name': '/models/nowhere'. Use `repo_type` argument if needed.\n",
    "start.arguments": "usage: launch_server.py [-h] --model-path MODEL_PATH\n"
    "launch_server.py: error: unrecognized arguments: --cuda-graph-max-bs 8\n",
    # Put together; see above.
    "start.out_of_memory": _BEGUN
    + _RAISED
    + "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79 GiB\n"
    + _FOLLOWED,
    "start.kv_cache": _BEGUN
    + _RAISED
    + "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static. Current value: "
    "mem_fraction_static=0.8\n" + _FOLLOWED,
    "start.nccl": _BEGUN
    + _RAISED
    + "torch.distributed.DistBackendError: NCCL error in: /pytorch/ProcessGroupNCCL.cpp:77, unhandled system error, "
    "NCCL version 2.27.7\nncclSystemError: System call (e.g. socket, malloc) or external library call failed.\n",
    "start.killed": _BEGUN + _FOLLOWED.replace("(exit code: 255)", "(exit code: -9)"),
    "start.gpu_fault": _BEGUN + _RAISED + "torch.AcceleratorError: CUDA error: device-side assert triggered\n",
    "start.shape": _BEGUN
    + _RAISED
    + "AssertionError: param_data.shape=torch.Size([6, 2]) loaded_weight.shape=[4, 2]\n",
    "start.import": "Traceback (most recent call last):\nModuleNotFoundError: No module named 'flashinfer'\n",
    "start.gpu": _BEGUN + _RAISED + "RuntimeError: Found no NVIDIA driver on your system.\n",
    "start.exception": _BEGUN + _RAISED + "sglang.srt.Strange: x\nKeyError: 'rope_theta'\n\n" + _FOLLOWED,
}
"""What each death leaves in the log."""
