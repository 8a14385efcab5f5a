# SPDX-License-Identifier: Apache-2.0
"""What this distribution offers. Read in every process, so it imports nothing and names the rest."""

PIPELINE_REGISTRY = [
    {
        # `_class_name` in a checkpoint's model_index.json.
        "model_arch": "AcmeToyVideoPipeline",
        "module_name": "acme_toy_video.pipeline",
        "class_name": "AcmeToyVideoPipeline",
        "pre_process_func_name": "get_pre_process_func",
        "post_process_func_name": "get_post_process_func",
        # Opens vLLM-Omni's video endpoints to the model.
        "final_output_type": "video",
    }
]
MODEL_SPECS = {"AcmeToyVideoPipeline": "acme_toy_video.spec:SPEC"}
# The major version of the SDK that this is written for.
SDK = 1
