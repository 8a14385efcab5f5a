# SPDX-License-Identifier: Apache-2.0
"""What this distribution registers with vLLM-Omni; the entry point `vllm_omni_neuron.models` names this module.

Importing it imports no model code: that happens when vLLM-Omni resolves the pipeline, or a plan is asked for.
"""

PIPELINE_REGISTRY = [
    {
        "model_arch": "WanPipeline",
        "module_name": "omni_neuron_wan22.pipeline",
        "class_name": "NeuronWanPipeline",
        "pre_process_func_name": "get_neuron_wan22_pre_process_func",
        "post_process_func_name": "get_neuron_wan22_post_process_func",
    },
    {
        "model_arch": "WanImageToVideoPipeline",
        "module_name": "omni_neuron_wan22.pipeline_i2v",
        "class_name": "NeuronWanI2VPipeline",
        "pre_process_func_name": "get_neuron_wan22_pre_process_func",
        "post_process_func_name": "get_neuron_wan22_post_process_func",
    },
]

# For `vllm-omni-neuron plan`: functions that return a `ModelSizes`, without arguments by a model's name, and with a
# checkpoint folder by the `_class_name` of its model_index.json.
_FUNCTIONS = {"wan22-t2v-a14b": "t2v_a14b", "wan22-i2v-a14b": "i2v_a14b", "wan22-ti2v-5b": "ti2v_5b"}
_CHECKPOINTS = [entry["model_arch"] for entry in PIPELINE_REGISTRY]
PLANNABLE_MODELS = {name: f"omni_neuron_wan22.planning:{function}" for name, function in _FUNCTIONS.items()}
PLANNABLE_CHECKPOINTS = dict.fromkeys(_CHECKPOINTS, "omni_neuron_wan22.planning:from_checkpoint")

# For `vllm-omni-neuron lower`, likewise; these return an object with `make(component, …)`.
LOWERABLE_MODELS = {name: f"omni_neuron_wan22.lowering:{function}" for name, function in _FUNCTIONS.items()}
LOWERABLE_CHECKPOINTS = dict.fromkeys(_CHECKPOINTS, "omni_neuron_wan22.lowering:from_checkpoint")
