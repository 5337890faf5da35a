// CPU milliseconds of llama.cpp (prebuilt, from the npm package node-llama-cpp) per decode step and per prefill.
// Usage: node llama_cpp.mjs NPM_FOLDER MODEL.gguf BATCH:CONTEXT [...]   One JSON line per pair, one thread.
// NPM_FOLDER is where `setup` installed node-llama-cpp.
import {resolve} from "node:path";

const STEPS = 32;
const [folder, path, ...pairs] = process.argv.slice(2);
const {getLlama} = await import(resolve(folder, "node_modules/node-llama-cpp/dist/index.js"));
const llama = await getLlama({gpu: false, build: "never", maxThreads: 1});
const model = await llama.loadModel({modelPath: path});
const cpuMs = () => { const {user, system} = process.cpuUsage(); return (user + system) / 1000; };

for (const pair of pairs) {
    const [batch, context] = pair.split(":").map(Number);
    const llamaContext = await model.createContext({
        sequences: batch, contextSize: context + STEPS + 16, threads: {ideal: 1, min: 1}, batchSize: Math.max(512, batch),
    });
    const started = cpuMs();
    const streams = await Promise.all(Array.from({length: batch}, async (_, row) => {
        const tokens = Array.from({length: context}, (_, i) => 1000 + ((row * 7919 + i * 104729) % 20000));
        const stream = llamaContext.getSequence().evaluate(tokens, {temperature: 0});
        await stream.next();
        return stream;
    }));
    const prefilled = cpuMs();
    for (let step = 0; step < STEPS; step++) await Promise.all(streams.map((stream) => stream.next()));
    const decoded = cpuMs();
    console.log(JSON.stringify({
        engine: "llama.cpp Q4_1", batch, context, prefill_ms: prefilled - started, decode_ms: (decoded - prefilled) / STEPS,
    }));
    await llamaContext.dispose();
}
process.exit(0);
