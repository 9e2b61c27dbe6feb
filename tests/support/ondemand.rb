# What Open OnDemand does with the files of a batch-connect app (OSC/ondemand: BatchConnect::App#submit_opts and
# Session#stage, views of sessions; 2026-08): ERB with trim_mode "-", the form's values as methods, YAML.safe_load.
# ruby ondemand.rb APP STAGED < values.json: prints the script's options and the card's HTML, or the error, as JSON.
require "erb"
require "json"
require "ostruct"
require "pathname"
require "yaml"

app, staged = ARGV.map { |path| Pathname.new(path) }
context = OpenStruct.new(JSON.parse($stdin.read))
erb = ->(path, binding) { ERB.new(path.read, trim_mode: "-").tap { |e| e.filename = path.to_s }.result(binding) }
begin
  opts = YAML.safe_load(erb.(app.join("submit.yml.erb"), context.instance_eval { binding }))
rescue StandardError => e
  puts JSON.generate(error: e.message)
  exit
end
# SmartAttributes: bc_num_hours, bc_account, bc_queue
opts["script"] = {
  "wall_time" => context.bc_num_hours.to_i * 3600,
  "accounting_id" => context.bc_account.to_s.empty? ? nil : context.bc_account,
  "queue_name" => context.bc_queue.to_s.empty? ? nil : context.bc_queue,
}.compact.merge(opts["script"])
staged_binding = Struct.new(:session, :context).new(nil, context).instance_eval { binding }
app.join("template").glob("*.erb").each do |path|
  file = staged.join(path.basename(".erb"))
  file.write(erb.(path, staged_binding))
  file.chmod(path.stat.mode)
end
connect = OpenStruct.new(host: "n7", port: 8888, password: "known-to-ada")
session = OpenStruct.new(output_file: staged.join("output.log"))
cards = { view: connect, completed: session }.to_h { |name, object|
  [name, erb.(app.join("#{name}.html.erb"), object.instance_eval { binding })]
}
puts JSON.generate(opts.merge(cards))
