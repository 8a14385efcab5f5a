# SPDX-License-Identifier: Apache-2.0
"""What this distribution registers with vLLM-Omni; the entry point `vllm_omni_neuron.models` names this module."""

PIPELINE_REGISTRY = [
    {
        "model_arch": "ZImagePipeline",
        "module_name": "omni_neuron_zimage.pipeline",
        "class_name": "NeuronZImagePipeline",
        "pre_process_func_name": "get_zimage_pre_process_func",
        "post_process_func_name": "get_zimage_post_process_func",
    },
]
MODEL_SPECS = {"ZImagePipeline": "omni_neuron_zimage.spec:SPEC"}
SDK = 1
