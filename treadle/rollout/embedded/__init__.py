from treadle.rollout.embedded.config import Config as Config
