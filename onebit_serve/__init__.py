"""`1bit serve`: a supervisor for local LLM servers that says ready only when they are warm.

A map, in reading order; a module imports only from above it (`tests/test_imports.py` has the whole
list and holds everyone to it).

    core/   values in, values out: no clock, file, socket or event loop
        errors facts                  what goes wrong, and what is known
        config presets options plan   settings and facts become commands
        http wire route view          heads, bodies, who answers, what is shown
        life admit                    one backend's states; who may ask it now
        warmup shapes warm_prompts    what is done before the first client
        policy laya                   which device a request is for
        score results report gate/    measuring and judging

    live/   the world, on trio
        machine spawn child           look around; start and stop a process group
        upstream probe                HTTP to a child; is it healthy, make it warm
        episode supervise house       one child; one backend; all of them
        door connection desk          let clients in; read requests; answer
        relay pump                    a reply's head and its body
        history prefix scorer         what traffic teaches; warm prompts; routing

    serve.py  bench/  gate/           one command each, made of the above
    cli/                              alone prints and exits
    fake_llama/                       a stand-in for llama-server; imports nothing of ours
"""

__version__ = "0.1.0"
