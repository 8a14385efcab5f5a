# SPDX-License-Identifier: Apache-2.0
"""What this distribution offers. Read in every process, so it imports nothing heavy and names the rest."""

PIPELINE_REGISTRY = [
    {
        # `_class_name` in a checkpoint's model_index.json.
        "model_arch": "ToyVideoPipeline",
        "class_name": "ToyVideoPipeline",
        "module_name": "acme_toy_video.pipeline",
        # Opens vLLM-Omni's video endpoints to the model.
        "final_output_type": "video",
        "pre_process_func_name": "get_toy_pre_process_func",
    }
]
