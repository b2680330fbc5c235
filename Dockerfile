# The engine in an image, for CPUs, or for NVIDIA GPUs with the build of torch that pip takes by default:
#   docker build -t infinity .
#   docker build -t infinity-cuda --build-arg PIP_EXTRA_INDEX_URL= .
FROM python:3.11-slim
# pip reads it. Of two builds of one version pip takes that with a local version, here 2.x+cpu: it has no libraries of CUDA.
ARG PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu
WORKDIR /opt/infinity
COPY constraints.txt ./
# In a layer of its own, which stays when the code changes.
RUN pip install --no-cache-dir -c constraints.txt torch
COPY pyproject.toml README.md LICENSE ./
COPY infinity ./infinity
COPY swapper ./swapper
RUN pip install --no-cache-dir -c constraints.txt ".[hf,plot]"
WORKDIR /work
# Threads that spin while they wait hold up each other where others use the machine as well.
ENV OMP_WAIT_POLICY=passive
CMD ["infinity", "doctor", "--nvme-path", "/nvme"]
