// JavaScript clients against the server at OCTAVO_URL: `npm test` in this folder, or `make test-clients`.
import assert from "node:assert/strict"
import { suite, test } from "node:test"

import { createAnthropic } from "@ai-sdk/anthropic"
import { createOpenAI } from "@ai-sdk/openai"
import { createOpenAICompatible } from "@ai-sdk/openai-compatible"
import Anthropic from "@anthropic-ai/sdk"
import { embedMany, generateText, Output, stepCountIs, streamText, tool } from "ai"
import { Ollama } from "ollama"
import { createOllama } from "ollama-ai-provider-v2"
import OpenAI from "openai"
import { zodResponseFormat, zodTextFormat } from "openai/helpers/zod"
import { z } from "zod"

const url = process.env.OCTAVO_URL
const model = "smollm2"
const question = "What is the capital of France?"
const messages = [{ role: "user", content: question }]
const City = z.object({ city: z.enum(["Paris", "Rome", "Vienna"]) })
const schema = z.toJSONSchema(City)
const description = "Tells the weather of a city."

async function joined(stream, textOf) {
  let text = ""
  for await (const part of stream) text += textOf(part) ?? ""
  return text
}

function isNear(vector, other) {
  const dot = vector.reduce((sum, value, index) => sum + value * other[index], 0)
  return Math.abs(dot - 1) < 0.02
}

suite("ollama", () => {
  const api = new Ollama({ host: url })
  const options = { temperature: 0, num_predict: 12 }
  const tools = [{ type: "function", function: { name: "get_weather", description, parameters: schema } }]

  test("chat", async () => {
    const whole = await api.chat({ model, messages, options })
    const stream = await api.chat({ model, messages, options, stream: true })
    assert.match(whole.message.content, /Paris/)
    assert.equal(await joined(stream, (part) => part.message.content), whole.message.content)
  })

  test("generate", async () => {
    const whole = await api.generate({ model, prompt: question, options, keep_alive: "5m" })
    const stream = await api.generate({ model, prompt: question, options, stream: true })
    assert.equal(await joined(stream, (part) => part.response), whole.response)
    assert.ok((await api.generate({ model, prompt: "And of Italy?", context: whole.context, options })).response)
  })

  test("options as Ollama's own defaults and beyond", async () => {
    const all = { repeat_last_n: 64, repeat_penalty: 1.1, num_ctx: 131072, mirostat: 1, typical_p: 0.9, top_k: 40 }
    assert.ok((await api.chat({ model, messages, options: { ...options, ...all } })).message.content)
  })

  test("tools and a format", async () => {
    const call = { function: { name: "get_weather", arguments: { city: "Rome" } } }
    const history = [...messages, { role: "assistant", content: "", tool_calls: [call] }]
    history.push({ role: "tool", tool_name: "get_weather", content: "sunny" })
    assert.ok((await api.chat({ model, messages: history, tools, options })).message.content)
    const { message } = await api.chat({ model, messages, format: schema, options: { ...options, num_predict: 40 } })
    City.parse(JSON.parse(message.content))
  })

  test("embeddings", async () => {
    const { embeddings } = await api.embed({ model, input: ["a cat", "a dog"], truncate: true })
    const { embedding } = await api.embeddings({ model, prompt: "a cat" })
    const length = Math.hypot(...embedding)
    assert.equal(embeddings.length, 2)
    assert.ok(isNear(embeddings[0], embedding.map((value) => value / length)))
  })

  test("the model", async () => {
    const { models } = await api.list()
    assert.deepEqual(models.map((one) => [one.name, one.details.format]), [[model, "gguf"]])
    assert.equal((await api.ps()).models.length, 1)
    assert.ok((await api.show({ model: "smollm2:latest" })).capabilities.includes("completion"))
    assert.equal((await api.pull({ model })).status, "success")
    assert.equal(await joined(await api.pull({ model, stream: true }), (part) => part.status), "success")
  })

  test("errors", async () => {
    for (const stream of [false, true]) {
      await assert.rejects(api.chat({ model: "nobody", messages, stream }), /the model 'nobody' does not exist/)
      await assert.rejects(api.chat({ model, messages, stream, options: { temperature: -1 } }), /temperature/)
    }
    await assert.rejects(api.delete({ model }), /\/api\/delete is not offered/)
  })
})

suite("openai", () => {
  const api = new OpenAI({ baseURL: `${url}/v1`, apiKey: "unused", maxRetries: 0 })
  const few = { model, temperature: 0, max_tokens: 12 }

  test("chat", async () => {
    const whole = await api.chat.completions.create({ ...few, messages })
    const stream = await api.chat.completions.create({ ...few, messages, stream: true })
    assert.match(whole.choices[0].message.content, /Paris/)
    assert.equal(await joined(stream, (part) => part.choices[0]?.delta.content), whole.choices[0].message.content)
    const helped = api.chat.completions.stream({ ...few, messages })
    assert.equal(await helped.finalContent(), whole.choices[0].message.content)
  })

  test("parsed answers", async () => {
    const response_format = zodResponseFormat(City, "city")
    const parsed = await api.chat.completions.parse({ ...few, max_tokens: 40, messages, response_format })
    City.parse(parsed.choices[0].message.parsed)
    const text = { format: zodTextFormat(City, "city") }
    City.parse((await api.responses.parse({ model, input: question, text, max_output_tokens: 40 })).output_parsed)
  })

  test("tools", async () => {
    const tools = [{ type: "function", function: { name: "get_weather", description, parameters: schema } }]
    const fields = { ...few, max_tokens: 60, messages, tools, tool_choice: "required" }
    const [call] = (await api.chat.completions.create(fields)).choices[0].message.tool_calls
    City.parse(JSON.parse(call.function.arguments))
    const streamed = await api.chat.completions.stream(fields).finalChatCompletion()
    assert.equal(streamed.choices[0].message.tool_calls[0].function.arguments, call.function.arguments)
    const history = [...messages, { role: "assistant", content: null, tool_calls: [call] }]
    history.push({ role: "tool", tool_call_id: call.id, content: "sunny" })
    assert.ok((await api.chat.completions.create({ ...few, messages: history, tools })).choices[0].message)
  })

  test("responses", async () => {
    const fields = { model, input: question, temperature: 0, max_output_tokens: 16 }
    const whole = await api.responses.create(fields)
    const stream = await api.responses.create({ ...fields, stream: true })
    const text = await joined(stream, (one) => (one.type === "response.output_text.delta" ? one.delta : ""))
    assert.equal(text, whole.output_text)
  })

  test("completions, embeddings, models", async () => {
    const whole = await api.completions.create({ ...few, prompt: "Once upon a time", stop: ["a", "b", "c", "d", "e"] })
    assert.equal(whole.choices[0].finish_reason, "stop")
    const { data } = await api.embeddings.create({ model, input: ["a cat", "a dog"] })
    assert.deepEqual(data.map((one) => Math.round(Math.hypot(...one.embedding) * 100)), [100, 100])
    assert.deepEqual((await api.models.list()).data.map((one) => one.id), [model])
  })

  test("errors", async () => {
    const refused = (fields) => api.chat.completions.create({ ...few, messages, ...fields })
    await assert.rejects(refused({ model: "nobody" }), OpenAI.NotFoundError)
    await assert.rejects(refused({ top_p: 2 }), (error) => error.status === 400 && error.param === "top_p")
  })
})

suite("anthropic", () => {
  const api = new Anthropic({ baseURL: url, apiKey: "unused", maxRetries: 0 })
  const few = { model, max_tokens: 12, temperature: 0, messages }

  test("messages", async () => {
    const whole = await api.messages.create(few)
    const streamed = await api.messages.stream(few).finalMessage()
    assert.match(whole.content[0].text, /Paris/)
    assert.deepEqual(streamed.content, whole.content)
    const { input_tokens, cache_read_input_tokens } = whole.usage
    const counted = await api.messages.countTokens({ model, messages })
    assert.equal(counted.input_tokens, input_tokens + cache_read_input_tokens)
  })

  test("tools", async () => {
    const tools = [{ name: "get_weather", description, input_schema: schema }]
    const fields = { ...few, max_tokens: 60, tools, tool_choice: { type: "any" } }
    const [call] = (await api.messages.create(fields)).content
    City.parse(call.input)
    const streamed = await api.messages.stream(fields).finalMessage()
    assert.deepEqual(streamed.content[0].input, call.input)
    const result = { type: "tool_result", tool_use_id: call.id, content: "sunny" }
    const history = [...messages, { role: "assistant", content: [call] }, { role: "user", content: [result] }]
    assert.ok((await api.messages.create({ ...few, messages: history, tools })).content)
  })

  test("errors", async () => {
    await assert.rejects(api.messages.create({ ...few, model: "nobody" }), Anthropic.NotFoundError)
    await assert.rejects(api.messages.create({ ...few, top_p: 2 }), /top_p/)
  })
})

const providers = {
  "openai-compatible": createOpenAICompatible({
    name: "octavo",
    baseURL: `${url}/v1`,
    supportsStructuredOutputs: true,
  })(model),
  "openai (Responses)": createOpenAI({ baseURL: `${url}/v1`, apiKey: "unused" }).responses(model),
  "openai (chat)": createOpenAI({ baseURL: `${url}/v1`, apiKey: "unused" }).chat(model),
  anthropic: createAnthropic({ baseURL: `${url}/v1`, apiKey: "unused" })(model),
  ollama: createOllama({ baseURL: `${url}/api` })(model),
}

for (const [name, languageModel] of Object.entries(providers)) {
  suite(`ai, ${name}`, () => {
    const isOllama = name === "ollama"
    // this provider writes the usual settings where Ollama does not look for them
    const few = (maxOutputTokens, fields) => ({
      ...{ model: languageModel, temperature: 0, maxOutputTokens, maxRetries: 0, prompt: question },
      ...(isOllama && { providerOptions: { ollama: { options: { temperature: 0, num_predict: maxOutputTokens } } } }),
      ...fields,
    })

    test("text", async () => {
      const whole = await generateText(few(16))
      assert.match(whole.text, /Paris/)
      assert.ok(whole.usage.outputTokens > 0)
      const stream = streamText(few(16, { onError: ({ error }) => assert.fail(error) }))
      assert.equal(await joined(stream.textStream, (part) => part), whole.text)
    })

    test("objects", async () => {
      City.parse((await generateText(few(60, { output: Output.object({ schema: City }) }))).output)
    })

    test("tools", async () => {
      const execute = async ({ city }) => `sunny in ${city}`
      const tools = { get_weather: tool({ description, inputSchema: City, execute }) }
      // Ollama's API knows no choice of a tool: whether the model calls is up to it
      const toolChoice = isOllama ? "auto" : { type: "tool", toolName: "get_weather" }
      const { steps } = await generateText(few(60, { tools, toolChoice, stopWhen: stepCountIs(2) }))
      assert.equal(steps.length, isOllama && !steps[0].toolCalls.length ? 1 : 2)
      for (const { input } of steps[0].toolCalls) City.parse(input)
    })
  })
}

test("ai, embeddings", async () => {
  const values = ["a cat", "a dog"]
  const compatible = createOpenAICompatible({ name: "octavo", baseURL: `${url}/v1` }).embeddingModel(model)
  const one = await embedMany({ model: compatible, values, maxRetries: 0 })
  const ollama = createOllama({ baseURL: `${url}/api` }).embeddingModel(model)
  const other = await embedMany({ model: ollama, values, maxRetries: 0 })
  assert.ok(one.embeddings.every((vector, index) => isNear(vector, other.embeddings[index])))
})
