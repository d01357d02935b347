from treadle.rollout.vllm.config import Config as Config
