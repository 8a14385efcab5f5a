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
PLANNABLE_MODELS = {"wan22-t2v-a14b": "omni_neuron_wan22.planning:t2v_a14b"}
PLANNABLE_CHECKPOINTS = {"WanPipeline": "omni_neuron_wan22.planning:from_checkpoint"}

# For `vllm-omni-neuron lower`, likewise; these return an object with `make(component, …)`.
LOWERABLE_MODELS = {"wan22-t2v-a14b": "omni_neuron_wan22.lowering:t2v_a14b"}
LOWERABLE_CHECKPOINTS = {"WanPipeline": "omni_neuron_wan22.lowering:from_checkpoint"}
